from __future__ import annotations

import torch

from tests.engines.small import llama, mixtral
from weightsync.core.types import Target
from weightsync.engines.base import Engine
from weightsync.engines.modules import ModuleEngine
from weightsync.engines.transformers import TransformersEngine
from weightsync.testing.conformance import EngineContract
from weightsync.testing.models import tiny_pair

TOKENS = torch.tensor([[1, 2, 3]])


class TestModuleEngine(EngineContract):
    """Plain modules that share embedding and head."""

    def make_engine(self) -> Engine:
        """Make one."""
        return ModuleEngine(*tiny_pair())

    def forward(self, engine: Engine, target: Target) -> torch.Tensor:
        """Call the module."""
        assert isinstance(engine, ModuleEngine)
        with torch.inference_mode():
            out: torch.Tensor = engine.targets[target].module(TOKENS)
        return out.clone()


class TestCompiledModules(TestModuleEngine):
    """The same, compiled."""

    def make_engine(self) -> Engine:
        """Make one."""
        verifier, draft = (torch.compile(model, backend="eager") for model in tiny_pair())
        assert isinstance(verifier, torch.nn.Module)
        assert isinstance(draft, torch.nn.Module)
        return ModuleEngine(verifier, draft)


class TestInferenceModules(TestModuleEngine):
    """B71: modules that were made under inference mode, without a draft."""

    def make_engine(self) -> Engine:
        """Make one."""
        with torch.inference_mode():
            return ModuleEngine(tiny_pair(shared=False)[0])


class TestTransformersEngine(EngineContract):
    """A mixture of experts, whose experts are fused in memory, and a small draft."""

    def make_engine(self) -> Engine:
        """Make one."""
        verifier, draft = mixtral(), llama(num_hidden_layers=1)
        draft.set_input_embeddings(verifier.get_input_embeddings())
        draft.lm_head.weight = verifier.lm_head.weight
        return TransformersEngine(verifier, draft)

    def forward(self, engine: Engine, target: Target) -> torch.Tensor:
        """Call the model without a cache."""
        assert isinstance(engine, TransformersEngine)
        with torch.no_grad():
            logits: torch.Tensor = engine.targets[target].module(TOKENS, use_cache=False).logits
        return logits
