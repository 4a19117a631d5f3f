"""Compose a vision-language model from a text model and a vision tower: `model.encoders`, and
`penstock models compose`.

The result is a model folder like any other: config.json, weights, tokenizer and processor. Its
projector is random.
"""

import shutil
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from penstock.compose.form import DROPPED, IMAGE_TOKEN, Form
from penstock.compose.idefics3 import Idefics3
from penstock.compose.llava import LINEAR, Llava
from penstock.compose.parts import CONFIG, PREPROCESSOR, Encoder, TextModel
from penstock.compose.tokenizer import with_tokens
from penstock.config.schema.model import SCALE_FACTOR, Projector
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import PART, remove, write_json
from penstock.core.replace_folder import rename_folder
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import INDEX, declared_dtype, save_tensors
from penstock.models.initialize import initialize
from penstock.models.multimodal import MULTIMODAL, stored_name
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.registry import get_family, native_family

PROCESSOR = "processor_config.json"
GENERATION = "generation_config.json"


def choose_form(projector: Projector, scale_factor: int = SCALE_FACTOR) -> Form:
    """The form of a model with this projector."""
    if projector == "pixel_shuffle":
        return Idefics3(scale_factor)
    return Llava("gelu" if projector == "mlp" else LINEAR)


def compose_folders(
    text: TextModel, encoder: Encoder, out: Path, form: Form, *, seed: int = 0
) -> dict[str, Any]:
    """Write to `out` the model of a text model and a vision tower, with a random projector.

    What is random is drawn from `seed`. `out` is created atomically. Returns facts.

    Raises:
        ConfigError: `out` is not empty.
        CapabilityError: the two cannot be put together.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already.\n  Name another folder with -o.")
    hf_config, text_config, tokenizer = compose_config(text, encoder, form)
    partial = out.with_name(out.name + PART)
    remove(partial)
    partial.mkdir(parents=True)
    try:
        vision = form.vision_tensors(encoder, hf_config, seed)
        vision |= form.projector_tensors(hf_config, seed)
        parts = chain([vision], _text_tensors(text, text_config, hf_config, seed))
        facts = _write_weights(parts, getattr(torch, hf_config["dtype"]), partial)
        write_json(partial / CONFIG, hf_config)
        tokenizer.save_pretrained(partial)
        write_json(partial / PREPROCESSOR, form.preprocessor(encoder, hf_config))
        write_json(partial / PROCESSOR, form.processor(hf_config))
        if text.weights and (text.weights / GENERATION).is_file():
            shutil.copyfile(text.weights / GENERATION, partial / GENERATION)
    except BaseException:
        remove(partial)
        raise
    rename_folder(partial, out)
    return {"image_token_id": tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), **facts}


def compose_config(
    text: TextModel, encoder: Encoder, form: Form
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The config.json of the whole and that of the text model, and the tokenizer. Reads no weights.

    Raises CapabilityError if the two cannot be put together.
    """
    text_config = _text_config(text)
    vision = form.vision_entries(encoder)
    # For its error: the file is read again once all weights are written.
    encoder.read_preprocessor()
    tokenizer = with_tokens(text.tokenizer, text.tokenizer_revision, form.tokens)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in form.tokens]
    config = {
        "architectures": [MULTIMODAL[form.model_type].architecture],
        "model_type": form.model_type,
        "text_config": {
            **{name: value for name, value in text_config.items() if name not in DROPPED},
            "vocab_size": max(int(text_config["vocab_size"]), *(id_ + 1 for id_ in ids)),
        },
        **vision,
        **form.token_entries(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)),
        "tie_word_embeddings": bool(text_config.get("tie_word_embeddings", False)),
        "dtype": str(declared_dtype(text_config) or torch.float32).removeprefix("torch."),
    }
    # For its errors: the whole must be a model that can be trained.
    get_family(config, "native").read(config)
    return config, text_config, tokenizer


def _text_config(text: TextModel) -> dict[str, Any]:
    """The config.json of a text model of a native family with the usual names of tensors."""
    config = dict(read_hf_config(text.config, text.foundation))
    model_type = config.get("model_type")
    if model_type in MULTIMODAL:
        raise CapabilityError(
            f"{text.config} is a {model_type}, which has a vision part of its own.\n"
            "  Train it on images as it is, or name a text model."
        )
    if "quantization_config" in config:
        raise CapabilityError(
            f"{text.config} is quantized.\n  Name the model that it was made from."
        )
    family = native_family(config)
    decoder = family.read(config) if family else None
    names = decoder.names if decoder else None
    if names is None or names.backbone != "model" or names.embedding != EMBEDDING_WEIGHT:
        raise CapabilityError(
            f"{text.config} is of type {model_type}, whose text models are not trained behind a "
            "vision tower.\n  Name a model of a native family whose tensors begin with "
            "model.layers, such as llama, mistral or qwen3."
        )
    if decoder and (decoder.logit_scale != 1 or decoder.logit_soft_cap is not None):
        raise CapabilityError(
            f"{text.config} is of type {model_type}, and scales or caps its logits, which"
            " transformers does not do behind a vision tower: it would answer otherwise there.\n"
            "  Name a model that does not, such as a llama, mistral or qwen3."
        )
    return config


def _write_weights(
    parts: Iterator[dict[str, torch.Tensor]], dtype: torch.dtype, out: Path
) -> dict[str, Any]:
    weight_map: dict[str, str] = {}
    total = parameters = 0
    for number, tensors in enumerate(parts):
        file = f"model-{number:05d}.safetensors"
        cast = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
        save_tensors(cast, out / file)
        weight_map |= dict.fromkeys(cast, file)
        total += sum(tensor.nbytes for tensor in cast.values())
        parameters += sum(tensor.numel() for tensor in cast.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {"tensors": len(weight_map), "parameters": parameters}


def _text_tensors(
    text: TextModel, text_config: Mapping[str, Any], hf_config: Mapping[str, Any], seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The text model's tensors by their names in the whole: those of a file at a time, or of a
    layer where they are drawn."""
    rows: int = hf_config["text_config"]["vocab_size"]
    backbone = MULTIMODAL[hf_config["model_type"]].backbone

    def placed(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return stored_name(name, backbone), _grown(name, tensor, rows)

    if text.weights:
        with SafetensorsFolder(text.weights) as folder:
            for names in folder.by_file().values():
                yield dict(placed(name, folder[name]) for name in names)
        return
    family = get_family(text_config, "native")
    config = family.read(text_config)
    shapes = family.weight_map(config).hf_shapes()
    for _, names in groupby(shapes, lambda name: name.split(".")[:3]):
        yield dict(placed(name, initialize(name, shapes[name], seed, config)) for name in names)


def _grown(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor; embedding and head with rows for new tokens, the mean of those there are."""
    if name not in (EMBEDDING_WEIGHT, HEAD_WEIGHT) or len(tensor) >= rows:
        return tensor
    # Rows at the mean leave the probabilities of the tokens there are nearly as they were (Hewitt
    # 2021).
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat((tensor, mean.expand(rows - len(tensor), -1)))
