"""Models from checkpoint folders, for `weightsync serve`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.core.errors import IncompleteError, InvalidRequestError, MalformedPayloadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class Kind(str, enum.Enum):
    """What a checkpoint is loaded as."""

    AUTO = "auto"
    """By the class that its config.json names."""
    CAUSAL = "causal"
    """A language model that generates text."""
    BASE = "base"
    """A model without a head, e.g. an encoder for embeddings."""


def kind_of(folder: Path) -> Kind:
    """Return CAUSAL or BASE, as the folder's config.json says.

    Raises:
        InvalidRequestError: there is no config.json.
        MalformedPayloadError: it is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidRequestError(f"{folder} is no checkpoint folder: it has no config.json")
    try:
        names: Any = json.loads(path.read_bytes()).get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise MalformedPayloadError(f"{path} is damaged: {error}") from None
    return Kind.CAUSAL if any(str(n).endswith(_GENERATIVE) for n in names) else Kind.BASE


def load_model(folder: Path, kind: Kind, device: str) -> PreTrainedModel:
    """Load one model.

    Raises:
        InvalidRequestError: the folder is none of a checkpoint.
        MalformedPayloadError: its config.json is damaged.
        IncompleteError: tensors are missing.
    """
    found = kind_of(folder)
    import transformers

    generative = (found if kind is Kind.AUTO else kind) is Kind.CAUSAL
    loader: Any = transformers.AutoModelForCausalLM if generative else transformers.AutoModel
    try:
        model, info = loader.from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,  # The other form is a pickle.
        )
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{folder} can't be loaded: {error}") from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise IncompleteError(
            f"{folder} lacks {len(missing)} tensors of a {type(model).__name__}: "
            + ", ".join(missing[:10]),
            subjects=missing[:10],
        )
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
