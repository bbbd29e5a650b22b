"""What a vLLM answers, bit for bit, and the comparison of an updated one with a fresh one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from tests.vllm.checkpoints import Tensors
from tests.vllm.engine import PROMPTS, Prompt, generate, running, worker_of
from tests.vllm.models import Model

Push = Callable[[LLM, Tensors], None]
"""Makes tensors live in a running vLLM, by way of the service."""


@dataclass(frozen=True)
class Seen:
    """What was seen while a vLLM answered.

    Attributes:
        tokens: The greedy tokens that follow each prompt.
        logits: Digests of the bytes of all logits that the verifier computed, call by call.
        proposals: What the draft proposed, call by call; empty without one.
    """

    tokens: Sequence[Sequence[int]]
    logits: Sequence[str]
    proposals: Sequence[Any]

    def differs_from(self, other: Seen) -> bool:
        """Tell whether tokens, logits and proposals, as far as there are any, are others."""
        pairs = [(self.tokens, other.tokens), (self.logits, other.logits)]
        if self.proposals:
            pairs.append((self.proposals, other.proposals))
        return all(mine != theirs for mine, theirs in pairs)


def see(llm: LLM, prompts: Sequence[Prompt] = PROMPTS, num_tokens: int = 16) -> Seen:
    """Let a vLLM whose worker is in this process answer, and watch it."""
    with watching(llm) as (logits, proposals):
        tokens = generate(llm, prompts, num_tokens)
    return Seen(tokens, logits, proposals)


@contextmanager
def watching(llm: LLM) -> Iterator[tuple[list[str], list[Any]]]:
    """Note digests of the verifier's logits, and the draft's proposals, within the block."""
    logits: list[str] = []
    proposals: list[Any] = []
    worker = worker_of(llm)
    with ExitStack() as stack:
        stack.enter_context(noted(worker.get_model(), "compute_logits", digest, logits))
        if drafter := getattr(worker.model_runner, "drafter", None):
            stack.enter_context(noted(drafter, "propose", _as_lists, proposals))
        yield logits, proposals


@contextmanager
def noted(owner: Any, method: str, note: Callable[[Any], Any], notes: list[Any]) -> Iterator[None]:
    """Note something of each result of a method within the block."""
    inner = getattr(owner, method)

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        notes.append(note(result))
        return result

    setattr(owner, method, noting)
    try:
        yield
    finally:
        delattr(owner, method)


def digest(tensor: torch.Tensor) -> str:
    """Return a short name for the shape and the bytes of a tensor."""
    octets = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(octets).hexdigest()[:16]}"


def _as_lists(proposed: Any) -> Any:
    return proposed.tolist() if isinstance(proposed, torch.Tensor) else proposed


@dataclass(frozen=True)
class Comparison:
    """What was seen of an engine that was updated, and of a fresh one.

    Attributes:
        before: With the weights that it started with.
        after: With new ones that came later.
        back: With the old ones, which came again.
        fresh: An engine that started with the new ones.
    """

    before: Seen
    after: Seen
    back: Seen
    fresh: Seen

    def check(self) -> None:
        """Fail unless an update is as good as a fresh start."""
        assert self.after == self.fresh
        assert self.back == self.before
        assert self.after.differs_from(self.before)


def compare(
    model: Model,
    folder: Path,
    push: Push,
    *,
    starting: Callable[[], None] = lambda: None,
    num_tokens: int = 16,
    **options: Any,
) -> Comparison:
    """Update a running vLLM, there and back, and start a fresh one.

    Args:
        model: What both load.
        folder: Where checkpoints are written.
        push: How new weights get into the running one.
        starting: Called before each of the two starts.
        num_tokens: How many follow each prompt.
        options: What vLLM is told beside the model's own.
    """
    old, new = model.tensors(1), model.tensors(2)
    prompts, told = model.prompts(), {**model.options, **options}
    starting()
    with running(model.write(folder / "old", old), **told) as llm:
        before = see(llm, prompts, num_tokens)
        push(llm, new)
        after = see(llm, prompts, num_tokens)
        push(llm, old)
        back = see(llm, prompts, num_tokens)
    starting()
    with running(model.write(folder / "new", new), **told) as llm:
        return Comparison(before, after, back, see(llm, prompts, num_tokens))
