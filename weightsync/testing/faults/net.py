"""The pair of models that a worker serves while faults happen."""

from __future__ import annotations

import torch
import xxhash
from torch import nn

from weightsync.testing.faults.weights import OWN, SHARED, Weights, draft_weights, verifier_weights


class Net(nn.Module):
    """A language model of 256 tokens and width 64, whose every output depends on every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.fc = nn.Linear(64, 64)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.head(torch.tanh(self.fc(self.embed(tokens))))
        return logits


def make_pair(seed: int) -> tuple[Net, Net]:
    """Return a verifier, and a draft with the verifier's embedding and head, of one version."""
    verifier, draft = Net(), Net()
    draft.embed.weight = verifier.embed.weight
    draft.head.weight = verifier.head.weight
    fill(verifier, verifier_weights(seed))
    fill(draft, draft_weights(seed))
    return verifier, draft


def fill(model: nn.Module, weights: Weights) -> None:
    """Write values into a model, in place."""
    state = model.state_dict()
    for name, array in weights.items():
        state[name].copy_(torch.from_numpy(array))


def live_weights(verifier: Net, draft: Net) -> tuple[Weights, Weights]:
    """Return copies of all that a verifier holds, and of what only its draft holds."""
    both = [
        {n: t.detach().clone().numpy() for n, t in model.state_dict().items()}
        for model in (verifier, draft)
    ]
    return both[0], {name: both[1][name] for name in OWN}


def are_shared(verifier: Net, draft: Net) -> bool:
    """Tell whether the pair still holds its shared weights once."""
    ours, theirs = verifier.state_dict(), draft.state_dict()
    return all(ours[name].data_ptr() == theirs[name].data_ptr() for name in SHARED)


def answer(model: Net) -> str:
    """Return a digest of what a model computes."""
    with torch.no_grad():
        logits = model(torch.arange(256))
    return xxhash.xxh3_64_hexdigest(logits.numpy().tobytes())
