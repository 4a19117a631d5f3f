"""Compose a LLaVA model from a text model and a vision tower: `model.encoders`, and
`penstock models compose`.

The result is a model folder like any other: config.json of type `llava`, weights, tokenizer and
processor. Its projector is random (Liu et al. 2023, "Visual Instruction Tuning").
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from penstock.compose.processor import IMAGE_TOKEN, llava_processor, with_image_token
from penstock.config.schema.model import Projector
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import PART, read_json, remove, write_json
from penstock.core.replace_folder import rename_folder
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import INDEX, declared_dtype, save_tensors
from penstock.models.builtin import SCHEME, builtin_encoder
from penstock.models.initialize import generator_for, initialize
from penstock.models.multimodal import MULTIMODAL, module_name
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.registry import get_family, native_family

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Tower:
    """What is needed of a type of vision tower."""

    vision_type: str
    """The model type of its vision model."""
    has_class_token: bool = True
    """Whether the first feature is of a token that stands for the whole image."""


TOWERS: Mapping[str, Tower] = {
    "clip": Tower("clip_vision_model"),
    "clip_vision_model": Tower("clip_vision_model"),
    "dinov2": Tower("dinov2"),
    "siglip": Tower("siglip_vision_model", has_class_token=False),
    "siglip_vision_model": Tower("siglip_vision_model", has_class_token=False),
}
"""By the `model_type` of an encoder's config.json."""

ACTIVATIONS: Mapping[Projector, str] = {"mlp": "gelu", "linear": "linear"}
"""Between the two layers of transformers' LLaVA projector."""


@dataclass(frozen=True)
class TextModel:
    """A text model to put behind a vision tower."""

    config: str
    """A folder with its config.json, or `builtin:<name>`."""
    weights: Path | None
    """The folder of its weights; None: they are drawn from the seed."""
    tokenizer: str
    """A folder, a hub id or `builtin:<name>`."""
    tokenizer_revision: str | None = None
    foundation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Overrides of entries of its config.json."""

    @classmethod
    def of_folder(cls, folder: Path) -> "TextModel":
        """A model with all its files in one folder."""
        return cls(str(folder), folder, str(folder))


@dataclass(frozen=True)
class Encoder:
    """A vision tower."""

    config: str
    """A folder with config.json and preprocessor_config.json, or `builtin:<name>`."""
    weights: Path | None
    """The folder of its weights; None: they are drawn from the seed."""

    def read(self) -> dict[str, Any]:
        """Its config.json."""
        if self.config.startswith(SCHEME):
            return builtin_encoder(self.config).config
        file = Path(self.config) / CONFIG
        if not file.is_file():
            raise CapabilityError(
                f"{self.config} has no {CONFIG}.\n  Name the folder of a vision model."
            )
        return read_json(file)

    def read_preprocessor(self) -> dict[str, Any]:
        """Its preprocessor_config.json. Raises CapabilityError if it has none."""
        if self.config.startswith(SCHEME):
            return builtin_encoder(self.config).preprocessor
        file = Path(self.config) / PREPROCESSOR
        if not file.is_file():
            raise CapabilityError(
                f"{self.config} has no {PREPROCESSOR}, which says how images are prepared.\n"
                "  Put that of the vision model there."
            )
        return read_json(file)


def compose_folders(
    text: TextModel,
    encoder: Encoder,
    out: Path,
    *,
    projector: Projector = "mlp",
    seed: int = 0,
) -> dict[str, Any]:
    """Write to `out` the LLaVA model of a text model and a vision tower, with a random projector.

    What is random is drawn from `seed`. `out` is created atomically. Returns facts.

    Raises:
        ConfigError: `out` is not empty.
        CapabilityError: the two cannot be put together.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already.\n  Name another folder with -o.")
    hf_config, text_config, tokenizer = compose_config(text, encoder, projector)
    partial = out.with_name(out.name + PART)
    remove(partial)
    partial.mkdir(parents=True)
    try:
        facts = _write_weights(text, text_config, encoder, hf_config, partial, seed)
        write_json(partial / CONFIG, hf_config)
        tokenizer.save_pretrained(partial)
        write_json(partial / PREPROCESSOR, encoder.read_preprocessor())
        write_json(partial / PROCESSOR, llava_processor(hf_config))
        if text.weights and (text.weights / GENERATION).is_file():
            shutil.copyfile(text.weights / GENERATION, partial / GENERATION)
    except BaseException:
        remove(partial)
        raise
    rename_folder(partial, out)
    return {"image_token_id": hf_config["image_token_index"], **facts}


def compose_config(
    text: TextModel, encoder: Encoder, projector: Projector
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The config.json of the whole and that of the text model, and the tokenizer. Reads no weights.

    Raises CapabilityError if the two cannot be put together.
    """
    text_config = _text_config(text)
    tower, vision_config = _vision_config(encoder)
    encoder.read_preprocessor()
    tokenizer = with_image_token(text.tokenizer, text.tokenizer_revision)
    token: int = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    rows = max(int(text_config["vocab_size"]), token + 1)
    dropped = {"architectures", "transformers_version"}
    config = {
        "architectures": [MULTIMODAL["llava"].architecture],
        "model_type": "llava",
        "text_config": {
            **{name: value for name, value in text_config.items() if name not in dropped},
            "vocab_size": rows,
        },
        "vision_config": {n: value for n, value in vision_config.items() if n not in dropped},
        "image_token_index": token,
        "projector_hidden_act": ACTIVATIONS[projector],
        # The last layer of a published tower was trained for another task.
        "vision_feature_layer": -2 if encoder.weights else -1,
        "vision_feature_select_strategy": "default" if tower.has_class_token else "full",
        "tie_word_embeddings": bool(text_config.get("tie_word_embeddings", False)),
        "dtype": str(declared_dtype(text_config)).removeprefix("torch."),
    }
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
    names = family.read(config).names if family else None
    if names is None or names.backbone != "model" or names.embedding != EMBEDDING_WEIGHT:
        raise CapabilityError(
            f"{text.config} is of type {model_type}, whose text models are not trained behind a "
            "vision tower.\n  Name a model of a native family whose tensors begin with "
            "model.layers, such as llama, mistral or qwen3."
        )
    return config


def _vision_config(encoder: Encoder) -> tuple[Tower, dict[str, Any]]:
    """The vision tower of an encoder's config.json, which may be of a model of images and text."""
    config = encoder.read()
    model_type = str(config.get("model_type"))
    tower = TOWERS.get(model_type)
    if tower is None:
        raise CapabilityError(
            f"{encoder.config} is of type {model_type}, and a vision tower is one of: "
            f"{', '.join(TOWERS)}."
        )
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    whole = {k: v for k, v in config.get("vision_config", config).items() if k != "model_type"}
    # With the defaults of fields that the file leaves out.
    return tower, AutoConfig.for_model(tower.vision_type, **whole).to_dict()


def _write_weights(
    text: TextModel,
    text_config: Mapping[str, Any],
    encoder: Encoder,
    hf_config: Mapping[str, Any],
    out: Path,
    seed: int,
) -> dict[str, Any]:
    """Write the weights, a file of the text model at a time; return facts."""
    dtype: torch.dtype = getattr(torch, hf_config["dtype"])
    weight_map: dict[str, str] = {}
    total = parameters = 0
    parts = chain(
        [_vision_tensors(encoder, hf_config, seed) | _projector_tensors(hf_config, seed)],
        _text_tensors(text, text_config, hf_config["text_config"]["vocab_size"], seed),
    )
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
    text: TextModel, text_config: Mapping[str, Any], rows: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The text model's tensors by their names in the whole: those of a file at a time, or of a
    layer where they are drawn."""
    if text.weights:
        with SafetensorsFolder(text.weights) as folder:
            for names in folder.by_file().values():
                yield {module_name(name): _grown(name, folder[name], rows) for name in names}
        return
    family = get_family(text_config, "native")
    config = family.read(text_config)
    shapes = family.weight_map(config).hf_shapes()
    for _, names in groupby(shapes, lambda name: name.split(".")[:3]):
        drawn = {name: initialize(name, shapes[name], seed, config) for name in names}
        yield {module_name(name): _grown(name, one, rows) for name, one in drawn.items()}


def _grown(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor; embedding and head with rows for new tokens, the mean of those there are."""
    if name not in (EMBEDDING_WEIGHT, HEAD_WEIGHT) or len(tensor) >= rows:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat((tensor, mean.expand(rows - len(tensor), -1)))


def _vision_tensors(
    encoder: Encoder, hf_config: Mapping[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """The tensors of the vision tower."""
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - takes seconds

    vision = dict(hf_config["vision_config"])
    config = AutoConfig.for_model(vision.pop("model_type"), **vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModel.from_config(config, dtype=torch.float32)
    if encoder.weights:
        load = type(made).from_pretrained
        made = load(encoder.weights, config=config, dtype="auto", use_safetensors=True)
    return {f"model.vision_tower.{name}": one for name, one in made.state_dict().items()}


def _projector_tensors(hf_config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The projector's two layers. The second of a linear one is the identity at first, so that the
    two are one layer of the usual initial values."""
    text = hf_config["text_config"]
    width, outer = hf_config["vision_config"]["hidden_size"], text["hidden_size"]
    std = text.get("initializer_range", 0.02)
    found: dict[str, torch.Tensor] = {}
    for layer, inputs in (("linear_1", width), ("linear_2", outer)):
        name = f"model.multi_modal_projector.{layer}"
        generator = generator_for(f"{name}.weight", seed)
        found[f"{name}.weight"] = torch.empty(outer, inputs).normal_(std=std, generator=generator)
        found[f"{name}.bias"] = torch.zeros(outer)
    if hf_config["projector_hidden_act"] == ACTIVATIONS["linear"]:
        found["model.multi_modal_projector.linear_2.weight"] = torch.eye(outer)
    return found
