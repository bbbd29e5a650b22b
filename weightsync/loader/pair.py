"""Load a verifier and its draft from checkpoint folders, and share what is equal."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightsync.core.errors import IncompleteError, InvalidRequestError, UnsupportedError
from weightsync.loader.report import SharingReport
from weightsync.loader.share import share_identical_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A verifier and a draft that hold equal weights once."""

    verifier: PreTrainedModel
    draft: PreTrainedModel
    report: SharingReport


def load_pair(
    verifier: str | Path,
    draft: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    all_equal: bool = False,
    exclude: Collection[str] = (),
) -> LoadedPair:
    """Load two causal language models of Hugging Face `transformers` and share equal weights.

    A draft's checkpoint may leave out its embedding and its head: these become the verifier's.
    Whatever else a checkpoint leaves out is an error, since `transformers` fills it with random
    values.

    Args:
        verifier: Folder with the verifier's `config.json` and safetensors.
        draft: The same for the draft.
        dtype: Element type of both models; None takes each checkpoint's own.
        device: Where both are put.
        all_equal: See `share_identical_weights`.
        exclude: See `share_identical_weights`.

    Raises:
        IncompleteError: a checkpoint lacks tensors.
        InvalidRequestError: a path is no folder with a `config.json`.
        UnsupportedError: `transformers` is not installed.
    """
    verifier_model, missing = _load(verifier, dtype, device)
    if missing:
        raise IncompleteError(
            f"the verifier's checkpoint {verifier} lacks {len(missing)} tensors: "
            + ", ".join(missing[:10]),
            subjects=missing[:10],
            missing=str(len(missing)),
        )
    draft_model, missing = _load(draft, dtype, device)
    report = share_identical_weights(
        verifier_model, draft_model, all_equal=all_equal, exclude=exclude, missing=missing
    )
    return LoadedPair(verifier_model, draft_model, report)


def _load(
    folder: str | Path, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the names that its checkpoint did not carry."""
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise UnsupportedError(
            "loading a checkpoint folder needs transformers: pip install weightsync[transformers]"
        ) from error
    # A name that is no folder would be looked for on the network.
    if not (Path(folder) / "config.json").is_file():
        raise InvalidRequestError(f"{folder} is no checkpoint folder: it has no config.json")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,  # The other form is a pickle.
        )
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{folder} can't be loaded: {error}") from None
    model, info = loaded
    return model.to(device).eval(), sorted(info["missing_keys"])
