"""The checkpoint that a model was loaded from: names, forms and values."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region

if TYPE_CHECKING:
    from typing_extensions import Self
    from vllm.config import LoadConfig, ModelConfig

_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Type and shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """The safetensors files of a model, read region by region. A context manager."""

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig) -> None:
        """Find the files that vLLM loaded.

        Raises:
            UnsupportedError: the model was not loaded from safetensors files.
        """
        if load_config.load_format not in _FORMATS:
            raise UnsupportedError(
                f"load format {load_config.load_format!r} of {model_config.model!r} names no "
                f"checkpoint to learn tensor names from; use one of {', '.join(_FORMATS)}"
            )
        _, files, safetensors, *_ = DefaultModelLoader(load_config)._prepare_weights(  # noqa: SLF001
            model_config.model,
            subfolder=None,
            revision=model_config.revision,
            fall_back_to_pt=False,
            allow_patterns_overrides=None,
        )
        if not safetensors:
            raise UnsupportedError(
                f"{model_config.model!r} has no safetensors files; convert the checkpoint"
            )
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file in sorted(files):
            handle = self._stack.enter_context(safe_open(file, "pt"))
            self._files |= dict.fromkeys(handle.keys(), handle)

    def forms(self) -> dict[str, TensorForm]:
        """Return the form of each tensor, by name."""
        return {name: self._form(name) for name in self._files}

    def _form(self, name: str) -> TensorForm:
        shape = tuple(self._files[name].get_slice(name).get_shape())
        # The type of an empty part, so that no values are read.
        part = self.read(name, Region((0,) * len(shape), (0,) * len(shape)))
        return TensorForm(part.dtype, shape)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor, of the checkpoint's type."""
        handle = self._files[name]
        if not region.sizes:
            found: torch.Tensor = handle.get_tensor(name)
        else:
            found = handle.get_slice(name)[region.slices]
        return found

    def __enter__(self) -> Self:
        """Return the open checkpoint."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._stack.close()
