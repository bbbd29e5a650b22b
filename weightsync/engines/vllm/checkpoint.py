"""The checkpoint that a model was loaded from: names, forms and values."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self
    from vllm.config import LoadConfig, ModelConfig

DUMMY = "dummy"
"""The load format in which vLLM makes weights up and reads no checkpoint."""

_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "pt",
    "npcache",
    DUMMY,
)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Type and shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """The files of a model, read region by region. A context manager.

    Attributes:
        loaded: Whether vLLM has loaded the values; otherwise it has made some up.
    """

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig, model: object) -> None:
        """Find the files that vLLM loaded, or with dummy weights would have loaded.

        Args:
            model_config: Names the model.
            load_config: Names the kind of files.
            model: May name kinds of files, and further files.

        Raises:
            UnsupportedError: there are none that can be read.
        """
        if load_config.load_format not in _FORMATS:
            raise UnsupportedError(
                f"load format {load_config.load_format!r} of {model_config.model!r} can't be read "
                "to learn the tensors of the checkpoint; start vLLM from safetensors files, with "
                f"one of the load formats {', '.join(_FORMATS)}"
            )
        self.loaded = load_config.load_format != DUMMY
        if not self.loaded:
            _check_is_there(model_config.model)
            load_config = dataclasses.replace(load_config, load_format="auto")
        self._stack = ExitStack()
        self._files: dict[str, tuple[_File, str]] = {}
        with ExitStack() as stack:
            for source in _sources(model_config, model):
                for path, is_safetensors in _paths(load_config, source):
                    kind = _Safetensors if is_safetensors else _Pickled
                    file = kind(path, stack)
                    # A name that occurs again counts once.
                    self._files |= {source.prefix + name: (file, name) for name in file.names()}
            self._stack = stack.pop_all()

    def forms(self) -> dict[str, TensorForm]:
        """Return the form of each tensor, by name. Reads no values."""
        return {name: self.form(name) for name in self._files}

    def form(self, name: str) -> TensorForm:
        """Return the form of one tensor."""
        file, own = self._files[name]
        return file.form(own)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor, of the checkpoint's type."""
        file, own = self._files[name]
        return file.read(own, region)

    def __enter__(self) -> Self:
        """Return the open checkpoint."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._stack.close()


def _check_is_there(folder: str) -> None:
    if not Path(folder).is_dir():
        raise UnsupportedError(
            f"with dummy weights the names and shapes of tensors are learnt from the headers of "
            f"safetensors files, and {folder!r} is no folder; give vLLM the folder of a checkpoint"
        )


def _sources(model_config: ModelConfig, model: Any) -> Iterator[DefaultModelLoader.Source]:  # noqa: ANN401
    yield DefaultModelLoader.Source(
        model_config.model,
        model_config.revision,
        fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
        allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
    )
    yield from getattr(model, "secondary_weights", ())


def _paths(
    load_config: LoadConfig, source: DefaultModelLoader.Source
) -> Iterator[tuple[str, bool]]:
    loader = DefaultModelLoader(load_config)
    try:
        _, paths, is_safetensors, _ = loader._prepare_weights(  # noqa: SLF001
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
    except (RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"{source.model_or_path!r} lacks the files to learn the tensors of the checkpoint from "
            f"({error}); put its safetensors files there: with dummy weights only their headers "
            "are read"
        ) from error
    for path in sorted(paths):
        yield path, is_safetensors


class _File(Protocol):
    """A file with tensors."""

    def names(self) -> Iterator[str]: ...

    def form(self, name: str) -> TensorForm: ...

    def read(self, name: str, region: Region) -> torch.Tensor: ...


class _Safetensors:
    """A file of safetensors."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._handle: Any = stack.enter_context(safe_open(path, "pt"))
        self._dtypes: dict[str, torch.dtype] = {}

    def names(self) -> Iterator[str]:
        yield from self._handle.keys()

    def form(self, name: str) -> TensorForm:
        part = self._handle.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if dtype not in self._dtypes:
            # That of an empty part, so that no values are read.
            empty = self.read(name, Region((0,) * len(shape), (0,) * len(shape)))
            self._dtypes[dtype] = empty.dtype
        return TensorForm(self._dtypes[dtype], shape)

    def read(self, name: str, region: Region) -> torch.Tensor:
        if not region.sizes:
            found: torch.Tensor = self._handle.get_tensor(name)
        else:
            found = self._handle.get_slice(name)[region.slices]
        return found


class _Pickled:
    """A file that `torch.save` has made of a state dict; nothing in it is executed."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise UnsupportedError(
                f"{path!r} can't be read without executing what is in it, or is of an old form "
                f"({error}); convert the checkpoint to safetensors"
            ) from error
        tensors = content.items() if isinstance(content, dict) else ()
        self._tensors = {name: t for name, t in tensors if isinstance(t, torch.Tensor)}
        if not self._tensors:
            raise UnsupportedError(
                f"{path!r} has no tensors by name; convert the checkpoint to safetensors"
            )
        stack.callback(self._tensors.clear)

    def names(self) -> Iterator[str]:
        yield from self._tensors

    def form(self, name: str) -> TensorForm:
        return TensorForm(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, name: str, region: Region) -> torch.Tensor:
        return self._tensors[name][region.slices]
