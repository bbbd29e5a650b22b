"""The engine for Hugging Face models, with assisted generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedModel

from weightsync.core.errors import UnsupportedError
from weightsync.core.types import Coordinates, Target
from weightsync.engines.base import Written
from weightsync.engines.conversion import checkpoint_layout
from weightsync.engines.modules import ModuleEngine
from weightsync.engines.naming import unwrap
from weightsync.layout.plan import Layout, ParameterSpec


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call of `generate` gave.

    Attributes:
        tokens: The new tokens, without the prompt.
        proposed: Number of tokens that the draft proposed.
        accepted: Number of those that the verifier accepted.
        steps: Number of the verifier's forward passes.
    """

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    steps: int


class TransformersEngine(ModuleEngine):
    """An `Engine` around a causal language model and, if there is one, its assistant.

    Tensors have the names of the folder that `save_pretrained` writes; parameters that are fused
    or named otherwise in memory can be addressed by their own name, too. The gate lies around each
    forward pass, so that a commit never waits for the end of a request.
    """

    def __init__(
        self,
        verifier: PreTrainedModel,
        assistant: PreTrainedModel | None = None,
        *,
        num_proposed: int = 4,
        coordinates: Coordinates | None = None,
        rebuild: Callable[[Written], None] | None = None,
    ) -> None:
        """Put models under the gate.

        Args:
            verifier: The policy.
            assistant: The draft.
            num_proposed: Tokens that the draft proposes per step; written into the assistant's
                generation config, where `generate` looks for it.
            coordinates: Place of this worker among its peers; default: alone.
            rebuild: See `ModuleEngine`.

        Raises:
            UnsupportedError: a tensor on the meta device, or of a type outside the contract.
        """
        super().__init__(
            verifier, assistant, coordinates=coordinates, rebuild=rebuild, name="transformers"
        )
        self._counts = _ForwardCounts()
        self._hooks = [
            self._counts.attach(unwrap(model.module), target)
            for target, model in self.targets.items()
        ]
        self._verifier = _model(verifier)
        self._assistant = None if assistant is None else _model(assistant)
        if self._assistant is not None:
            config = self._assistant.generation_config
            config.num_assistant_tokens = num_proposed
            # Neither the last acceptance nor the draft's own doubts change the number.
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0

    def _plan(self, target: Target, parameters: Sequence[ParameterSpec]) -> Layout:
        return checkpoint_layout(_model(self.targets[target].module), parameters)

    @property
    def version(self) -> str:
        """Version of transformers."""
        return transformers.__version__

    def generate(self, prompt: Sequence[int], **options: Any) -> Generation:  # noqa: ANN401
        """Continue a prompt, with the assistant's help if there is one.

        Safe to call from several threads; weights may be committed between two of its steps.

        Args:
            prompt: Token ids, at least one.
            options: As for `PreTrainedModel.generate`, e.g. `max_new_tokens`, `do_sample`.

        Raises:
            QuarantinedError: a model must not serve.
            UnsupportedError: the verifier is no generative model.
        """
        if not isinstance(self._verifier, GenerationMixin):
            raise UnsupportedError(f"a {type(self._verifier).__name__} does not generate text")
        ids = torch.tensor([list(prompt)], device=self._verifier.device)
        self._counts.reset()
        output = self._verifier.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=self._assistant, **options
        )
        tokens = tuple(output[0, ids.shape[1] :].tolist())
        steps, proposed = self._counts[Target.VERIFIER], self._counts[Target.DRAFT]
        # Each step gives one token of the verifier's own behind the accepted ones.
        return Generation(tokens, proposed, len(tokens) - steps, steps)

    def close(self) -> None:
        """Take all hooks off the models; they run on without the gate."""
        super().close()
        while self._hooks:
            self._hooks.pop().remove()


def _model(module: torch.nn.Module) -> PreTrainedModel:
    inner = unwrap(module)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"{type(inner).__name__} is no model of transformers; use ModuleEngine")
    return inner


class _ForwardCounts(threading.local):
    """Forward passes of the calling thread since its last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._counts = dict.fromkeys(Target, 0)

    def __getitem__(self, target: Target) -> int:
        return self._counts[target]

    def attach(self, model: torch.nn.Module, target: Target) -> RemovableHandle:
        def count(_module: torch.nn.Module, _args: object) -> None:
            self._counts[target] += 1

        return model.register_forward_pre_hook(torch.compiler.disable(count))  # type: ignore[no-untyped-call]
