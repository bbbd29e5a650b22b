"""The draft: an EAGLE head, one layer that continues the verifier's own hidden states."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel


class Eagle(nn.Module):
    """Predicts hidden states; the embedding and the output head are the verifier's.

    It is the model that vLLM makes of a checkpoint with the method `eagle`: no norm at either end.
    """

    def __init__(self, verifier: LlamaForCausalLM) -> None:
        """Make a draft with random weights."""
        super().__init__()
        # A list, so that what belongs to the verifier does not become the draft's.
        self._verifier = [verifier]
        config = copy.deepcopy(verifier.config)
        config.num_hidden_layers = 1
        config.architectures = [type(verifier).__name__]
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        body = LlamaModel(config)
        del body.embed_tokens
        body.register_module("norm", nn.Identity())
        body.layers[0].register_module("input_layernorm", nn.Identity())
        self.body = body

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after some tokens.

        Args:
            tokens: int64, (size, length).
            hidden: The hidden states before each, (size, length, hidden).
        """
        (verifier,) = self._verifier
        read = torch.cat([verifier.model.embed_tokens(tokens), hidden], dim=-1)
        states: torch.Tensor = self.body(
            inputs_embeds=self.fc(read), use_cache=False
        ).last_hidden_state
        return states

    def guesses(
        self, tokens: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what both say: one token ahead, and two, which it says of what it said itself."""
        (verifier,) = self._verifier
        near = self(tokens[:, 1:], hidden[:, :-1])
        far = self(tokens[:, 2:], near[:, :-1])
        told = verifier.lm_head(torch.cat([near, far], dim=1))
        return told, torch.cat([logits[:, 1:], logits[:, 2:]], dim=1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the draft's weights under the names of a checkpoint."""
        return {name.removeprefix("body."): value for name, value in self.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint folder, without what the draft borrows."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def save_pair(verifier: LlamaForCausalLM, draft: Eagle, folder: Path) -> None:
    """Write two checkpoint folders, `verifier` and `draft`."""
    verifier.save_pretrained(folder / "verifier")
    draft.save(folder / "draft")
