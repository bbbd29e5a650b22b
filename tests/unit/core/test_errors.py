from __future__ import annotations

import pytest

from weightsync.core import errors
from weightsync.core.errors import Reason, TargetBusyError, WeightSyncError


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_own_class(reason: Reason) -> None:
    """A reason leads to exactly one class, which names the reason and is documented."""
    kind = WeightSyncError.class_for(reason)
    assert kind is not WeightSyncError
    assert kind.reason is reason
    assert kind.__doc__


def test_classes_are_named_after_their_reasons() -> None:
    """`TARGET_BUSY` is `TargetBusyError`; there is no class beside those of the reasons."""
    named = {
        name.removesuffix("Error").lower()
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, WeightSyncError)
    }
    assert named == {reason.name.replace("_", "").lower() for reason in Reason} | {"weightsync"}


def test_an_error_carries_facts() -> None:
    """Text, subjects, retry time and metadata are what was given."""
    error = TargetBusyError("held", subjects=["draft"], retry_after=0.5, holder="me")
    assert str(error) == "held"
    assert (error.subjects, error.retry_after, error.metadata) == (
        ("draft",),
        0.5,
        {"holder": "me"},
    )


def test_facts_may_be_left_out() -> None:
    """An error with a text only has no subjects, no retry time and no metadata."""
    error = TargetBusyError("held")
    assert (error.subjects, error.retry_after, error.metadata) == ((), None, {})
