"""Small models that have what real ones trip over."""

from __future__ import annotations

import torch
from torch import nn


class Tiny(nn.Module):
    """A language model of 10 tokens and width 4, with both kinds of buffers.

    Attributes:
        embed: Input embedding, (10, 4).
        fc: Linear, (4, 4) and (4,).
        ln: Layer norm, (4,) twice.
        head: Output head, (10, 4), no bias.
        rot: Buffer (4,) that is not in checkpoints.
        rbias: Buffer (4,) that is, in float32 even when the rest is not.
    """

    rot: torch.Tensor
    rbias: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Make a model with random parameters of a dtype."""
        super().__init__()
        self.embed = nn.Embedding(10, 4, dtype=dtype)
        self.fc = nn.Linear(4, 4, dtype=dtype)
        self.ln = nn.LayerNorm(4, dtype=dtype)
        self.head = nn.Linear(4, 10, bias=False, dtype=dtype)
        self.register_buffer("rot", torch.ones(4), persistent=False)
        self.register_buffer("rbias", torch.zeros(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits.

        Args:
            tokens: int64 of shape (...,), each below 10.

        Returns:
            Shape (..., 10), in the dtype of the parameters.
        """
        hidden = self.embed(tokens) * self.rot.to(self.embed.weight.dtype)
        hidden = self.ln(self.fc(hidden) + self.rbias.to(hidden.dtype))
        logits: torch.Tensor = self.head(hidden)
        return logits


def tiny_pair(
    *, shared: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tiny, Tiny]:
    """Return a verifier and a draft, the draft with the verifier's embedding and head if shared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        verifier, draft = Tiny(dtype), Tiny(dtype)
    if shared:
        draft.embed.weight = verifier.embed.weight
        draft.head.weight = verifier.head.weight
    return verifier, draft
