from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.core.errors import InvalidRequestError, UnknownTensorError
from weightsync.core.names import (
    MAX_PATTERN_LENGTH,
    MAX_PATTERNS,
    IgnorePatterns,
    closest,
    shorten,
    unknown_tensor,
)
from weightsync.core.types import Target

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(12) for p in "qkvo"),
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.wieght", "lm_head.weight"),
        ("layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.11.self_attn.k_porj.weight", "model.layers.11.self_attn.k_proj.weight"),
    ],
)
def test_the_closest_name_is_the_one_that_was_meant(name: str, expected: str) -> None:
    """Slips of the pen and other prefixes lead to the name that was meant (B23)."""
    assert closest(name, NAMES) == expected


def test_no_name_is_offered_that_is_not_alike() -> None:
    """Without a name that looks alike there is no guess."""
    assert closest("zzz", NAMES) is None
    assert closest("lm_head.weight", []) is None


def test_a_name_of_a_megabyte_among_many_names() -> None:
    """The cost does not grow with the length of a name, nor steeply with the number of others."""
    many = [f"model.layers.{i}.mlp.experts.{j}.w.weight" for i in range(100) for j in range(400)]
    assert closest("x" * 2**20, many) is None
    assert closest("layers.99.mlp.experts.399.w.weight", many) == many[-1]


def test_the_error_for_an_unknown_tensor() -> None:
    """It names target, tensor and the closest name, and says what to do."""
    error = unknown_tensor(Target.DRAFT, "lm_head.wieght", NAMES)
    assert isinstance(error, UnknownTensorError)
    for word in ("draft", "'lm_head.wieght'", "'lm_head.weight'", "ignore_names"):
        assert word in str(error)
    assert error.subjects == ("lm_head.wieght",)


def test_the_error_for_a_name_like_no_other() -> None:
    """A long name is told in short, and no closest one is made up."""
    error = unknown_tensor(Target.VERIFIER, "y" * 1024, NAMES)
    assert len(str(error)) < 400
    assert "closest" not in str(error)


@given(st.text(max_size=300), st.integers(10, 120))
def test_shorten(name: str, length: int) -> None:
    """A short name stays; a long one keeps its start and end and is little longer than asked."""
    short = shorten(name, length)
    if len(name) <= length:
        assert short == name
    else:
        assert len(short) <= length + 3
        assert (name[0], name[-1]) == (short[0], short[-1])


def test_patterns_fit_whole_names() -> None:
    """A pattern has to fit from the first to the last character, in the right case (B17)."""
    patterns = IgnorePatterns(["confidence_head.*", "*.d2?", "x[0-9]"])
    for name in ("confidence_head.weight", "model.d2t", "x7"):
        assert patterns.match(name)
    for name in ("my.confidence_head.weight", "d2t", "x77", "Confidence_head.weight"):
        assert not patterns.match(name)


def test_no_patterns_fit_nothing() -> None:
    """Without patterns nothing is ignored."""
    assert not IgnorePatterns([]).match("")


@given(st.text(min_size=1, max_size=40), st.text(max_size=60))
def test_any_text_is_a_pattern(pattern: str, name: str) -> None:
    """No text makes the compiler fail or warn, brackets and backslashes included."""
    IgnorePatterns([pattern]).match(name)


@pytest.mark.parametrize(
    ("patterns", "subject"),
    [
        (["a", ""], "ignore_names[1]"),
        (["x" * (MAX_PATTERN_LENGTH + 1)], "ignore_names[0]"),
        (["x"] * (MAX_PATTERNS + 1), "ignore_names"),
    ],
)
def test_bad_patterns_are_refused(patterns: list[str], subject: str) -> None:
    """Empty, too long and too many patterns are errors that name the field."""
    with pytest.raises(InvalidRequestError) as caught:
        IgnorePatterns(patterns)
    assert caught.value.subjects == (subject,)


def test_a_hostile_pattern_ends() -> None:
    """Many stars against a long name that almost fits do not run for ever."""
    patterns = IgnorePatterns(["*a" * 100 + "b"] * MAX_PATTERNS)
    assert not patterns.match("a" * 1024)
