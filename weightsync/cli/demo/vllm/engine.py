"""A real vLLM in this process, with speculative decoding and the service in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from weightsync.cli.demo.vllm.plan import StoryPlan

_PREFIX = "vllm:spec_decode_num_"
_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Counts:
    """What vLLM's own metrics count since its start.

    Attributes:
        proposals: How often the draft has made a proposal.
        proposed: Tokens in all of them.
        accepted: Those that the verifier has accepted.
        by_position: The same, by the position in the proposal.
    """

    proposals: int
    proposed: int
    accepted: int
    by_position: tuple[int, ...]

    @classmethod
    def read(cls, llm: LLM) -> Counts:
        """Read them."""
        found = {metric.name: metric for metric in llm.get_metrics()}
        return cls(
            found[f"{_PREFIX}drafts"].value,
            found[f"{_PREFIX}draft_tokens"].value,
            found[f"{_PREFIX}accepted_tokens"].value,
            tuple(found[f"{_PREFIX}accepted_tokens_per_pos"].values),
        )

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        return Counts(
            self.proposals - before.proposals,
            self.proposed - before.proposed,
            self.accepted - before.accepted,
            tuple(b - a for a, b in zip(before.by_position, self.by_position, strict=True)),
        )


@contextmanager
def running(folder: Path, plan: StoryPlan, directory: Path) -> Iterator[LLM]:
    """Run a vLLM on the checkpoints `verifier` and `draft` of a folder.

    Args:
        folder: The folder of both.
        plan: How much the draft proposes, and the seed.
        directory: Where the service says its address.
    """
    llm = LLM(
        model=str(folder / "verifier"),
        speculative_config={
            "method": "eagle",
            "model": str(folder / "draft"),
            "num_speculative_tokens": plan.num_proposed,
        },
        weight_transfer_config={"backend": "weightsync"},
        additional_config={"weightsync": {"directory": str(directory)}},
        # Tokens are bytes.
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=plan.num_prompts,
        kv_cache_memory_bytes=_MEMORY,
        # Element types as in training, so that all can be compared bit for bit.
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        seed=plan.seed,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        # Else a second engine does not start in this process.
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the greedy tokens that follow some prompts."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    answers = llm.generate(asked, params, use_tqdm=False)
    return tuple(tuple(answer.outputs[0].token_ids) for answer in answers)
