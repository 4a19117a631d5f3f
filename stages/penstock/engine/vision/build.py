"""The vision part of a run's model: whether it can be trained, and what the engine builds of it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from penstock.adapters.names import parse_lora_name
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.activations.checkpointing import VISION as RECOMPUTED
from penstock.engine.distributed.collectives import Residual
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.pipeline_stages import layers_of_stages
from penstock.engine.vision.encoded import require_encodable
from penstock.engine.vision.image_inputs import ImageInputBuilder, require_videos
from penstock.engine.vision.image_shares import ImageShares
from penstock.engine.vision.image_text import (
    NO_VIDEOS,
    ImageTextInputs,
    build_image_text_inputs,
    check_image_text,
    require_trained,
)
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import layer_flops
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import VISION, VISION_TYPES, VisionConfig, is_vision, read_vision
from penstock.models.weights import vision_name


def checked_vision(
    run: RunConfig, hf_config: Mapping[str, Any], config: DecoderConfig, *, images: bool
) -> VisionConfig | None:
    """The vision part that is built; None without `images`, or if it is of the model's own code.

    Raises ConfigError and CapabilityError for a model that does not take images, or settings that
    cannot be honoured with them.
    """
    if isinstance(config, AutoModelConfig):
        check_image_text(run, hf_config, config, images=images)
        return None
    if not images:
        _check_text(run, hf_config)
        return None
    vision = read_vision(hf_config)
    if run.train.mtp_loss_weight and run.train.pipeline_parallel_size > 1:
        raise ConfigError(
            f"train.mtp_loss_weight is {run.train.mtp_loss_weight}, and the data has images: the"
            " layers that predict further tokens are in the last pipeline stage, and the image"
            " features that they take in the first.\n"
            "  Write mtp_loss_weight: 0, or data_parallel_shard_size:"
            f" {run.train.pipeline_parallel_size} instead of pipeline_parallel_size."
        )
    if (
        vision.type.bidirectional
        and run.train.objective == "preference"
        and run.data.shares_prompts
    ):
        raise ConfigError(
            "data.share_prompts lays both answers to a prompt into one document, and the data has"
            f" images, whose tokens attend to one another in a {hf_config.get('model_type')}.\n"
            "  Write data.share_prompts: false."
        )
    _check_pipeline(run, vision, config)
    require_encodable(run, vision)
    return vision


def check_videos(config: DecoderConfig, vision: VisionConfig | None) -> None:
    """Raise CapabilityError for a model that is not trained on videos. `vision` is the vision part
    that is built, None if it is of the model's own code."""
    if isinstance(config, AutoModelConfig):
        raise CapabilityError(NO_VIDEOS)
    if vision is not None:
        require_videos(vision)


def _check_text(run: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of parts that are not built without images."""
    parts, model_type = run.model.freeze, hf_config.get("model_type")
    if parts is not None and model_type not in VISION_TYPES:
        raise ConfigError(
            f"model.freeze is {parts}, and models of type {model_type} are not trained on images:"
            " they have no such parts.\n  Leave model.freeze out."
        )
    require_trained(parts, images=False)
    modules = run.train.recompute_modules or []
    if RECOMPUTED in modules:
        raise ConfigError(
            f"train.recompute_modules is {modules}, and the data has no images: there is no vision"
            " tower to recompute.\n  Leave vision out, or use data with images."
        )


def _check_pipeline(run: RunConfig, vision: VisionConfig, config: DecoderConfig) -> None:
    if run.train.pipeline_parallel_size == 1 or not vision.num_deepstack:
        return
    first = len(layers_of_stages(run.train, layer_flops(config, run.data.row_length))[0])
    if first < vision.num_deepstack:
        raise ConfigError(
            f"train.pipeline_parallel_size {run.train.pipeline_parallel_size} puts {first} of the"
            f" model's layers into the first stage, and image features are added after the first"
            f" {vision.num_deepstack}, which must be there (DeepStack).\n"
            "  Write a pipeline_parallel_split whose second stage begins at layer"
            f" {vision.num_deepstack} or later, or data_parallel_shard_size:"
            f" {run.train.pipeline_parallel_size} instead of a pipeline."
        )


def build_outline(hf_config: Mapping[str, Any]) -> VisionTower:
    """The vision part on the meta device, for its names and shapes."""
    with torch.device("meta"):
        return VisionTower(read_vision(hf_config))


def trained_shapes(
    checkpoint: Iterable[str], hf_config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """`WeightMap.vision` of the vision part's parameters that a training checkpoint has, or has
    adapters of: those that were trained. `checkpoint` are the names of its tensors."""
    trained: set[str] = set()
    for name in filter(is_vision, checkpoint):
        factor = parse_lora_name(name)
        trained.add(f"{factor.hf_module}.weight" if factor else name)
    if not trained:
        return {}
    shapes = build_outline(hf_config).shapes
    return {name: shape for name, shape in shapes.items() if vision_name(name) in trained}


def build_image_inputs(
    run: RunConfig,
    vision: VisionConfig | None,
    parts: Sequence[CausalLM],
    config: DecoderConfig,
    mesh: Mesh,
    residual: Residual,
) -> ImageInputBuilder | ImageTextInputs | None:
    """What builds the images' inputs; None without a vision part. Collective."""
    if isinstance(config, AutoModelConfig):
        return build_image_text_inputs(config)
    if vision is None:
        return None
    towers = [part.vision for part in parts if isinstance(part, Decoder) and part.vision]
    tower = towers[0] if towers else None
    weights = [*tower.parameters()] if tower else []
    is_trained = any(param.requires_grad for param in weights)
    is_gathered = bool(weights) and run.train.data_parallel_mode == "fsdp2"
    shares = ImageShares.of(mesh, residual)
    fills, is_encoded = is_trained or is_gathered, run.data.encode_images
    return ImageInputBuilder(vision, tower, fills, is_encoded, shares if weights else None)


def left_to_base(params: Iterable[LocalParam]) -> set[int]:
    """The ids of the parameters that checkpoints leave out: frozen ones of the vision part, which
    are loaded from the base model, and exported as the base model has them."""
    return {
        id(param.parameter)
        for param in params
        if param.name.startswith(VISION) and not param.parameter.requires_grad
    }
