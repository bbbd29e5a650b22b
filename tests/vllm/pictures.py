"""A tiny model that looks at pictures: a Llama with the vision tower of Idefics 3."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.vllm import checkpoints
from tests.vllm.checkpoints import HIDDEN, INNER, LLAMA, VOCAB, Shapes

_WIDTH, _PATCH, _PIXELS, _LAYERS = 64, 14, 56, 2
_PATCHES = (_PIXELS // _PATCH) ** 2
_SHUFFLED = 4  # patches that become one token
_IMAGE = 508
_WORDS = {
    505: "<end_of_utterance>",
    506: "<global-img>",
    507: "<fake_token_around_image>",
    _IMAGE: "<image>",
}

CONFIG: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "text_config": LLAMA,
    "vision_config": {
        "hidden_size": _WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "image_size": _PIXELS,
        "patch_size": _PATCH,
    },
    "image_token_id": _IMAGE,
    "scale_factor": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Yield names and shapes of the tensors of the whole model."""
    for name, shape in checkpoints.shapes(config["text_config"]):
        yield name.replace("model.", "model.text_model."), shape
    vision = "model.vision_model."
    yield f"{vision}embeddings.patch_embedding.weight", (_WIDTH, 3, _PATCH, _PATCH)
    yield f"{vision}embeddings.patch_embedding.bias", (_WIDTH,)
    yield f"{vision}embeddings.position_embedding.weight", (_PATCHES, _WIDTH)
    for layer in range(_LAYERS):
        yield from _layer(f"{vision}encoder.layers.{layer}.")
    yield from _norm(f"{vision}post_layernorm")
    yield "model.connector.modality_projection.proj.weight", (HIDDEN, _SHUFFLED * _WIDTH)


def _layer(prefix: str) -> Shapes:
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from _linear(f"{prefix}self_attn.{part}", _WIDTH, _WIDTH)
    yield from _linear(f"{prefix}mlp.fc1", INNER, _WIDTH)
    yield from _linear(f"{prefix}mlp.fc2", _WIDTH, INNER)
    yield from _norm(f"{prefix}layer_norm1")
    yield from _norm(f"{prefix}layer_norm2")


def _linear(name: str, rows: int, columns: int) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str) -> Shapes:
    yield f"{name}.weight", (_WIDTH,)
    yield f"{name}.bias", (_WIDTH,)


def prompts() -> Sequence[Any]:
    """Return a prompt without a picture, and the same words around two pictures."""
    pixels = np.arange(3 * _PIXELS * _PIXELS).reshape(_PIXELS, _PIXELS, 3)
    pictures = [Image.fromarray((pixels % n * 6).astype(np.uint8)) for n in (37, 41)]
    return [
        [5, 6, 7, 8],
        *(
            {"prompt_token_ids": [5, _IMAGE, 7, 8], "multi_modal_data": {"image": picture}}
            for picture in pictures
        ),
    ]


def write_processor(folder: Path) -> None:
    """Add to a checkpoint what turns words and pictures into tensors."""
    words = {_WORDS.get(i, f"t{i}"): i for i in range(VOCAB)}
    made: Any = PreTrainedTokenizerFast
    made(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),  # noqa: S106
        unk_token="t0",  # noqa: S106
        pad_token="t0",  # noqa: S106
        eos_token="t2",  # noqa: S106
        additional_special_tokens=list(_WORDS.values()),
    ).save_pretrained(folder)
    size = {"longest_edge": _PIXELS}
    looks = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": size,
        "max_image_size": size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(looks))
    image_tokens = _PATCHES // _SHUFFLED
    both = {"processor_class": "Idefics3Processor", "image_seq_len": image_tokens}
    (folder / "processor_config.json").write_text(json.dumps(both))
