"""Images and audio of transformers' multimodal models, whose towers are the model's own: inputs of
this rank, and which parts are frozen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.config.schema.model import Part
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.vision.freeze import frozen_parts
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.media.absent_tower import WHY
from penstock.models.automodel.media.cross_attention import layers_of_images
from penstock.models.automodel.outline import AutoModelConfig, MediaTraits
from penstock.models.decoder_config import DecoderConfig
from penstock.models.vision.features import SECONDS
from penstock.models.vision.positions import feature_index, image_places
from penstock.models.vision.tower import ImageInputs
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device

NO_VIDEOS = (
    "the data has videos, on which models are not trained through transformers' own code.\n"
    "  Write model.backend: native, or leave the videos out."
)

# The output of a processor with the features of audio.
AUDIO_INPUT = "input_features"


@dataclass(frozen=True)
class ImageTextInputs:
    """Builds the inputs of a multimodal model: the outputs of its processor, by their names."""

    traits: MediaTraits

    def with_layout(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch: the model computes positions and masks itself."""
        return batch

    def build(
        self,
        batch: MicroBatch,
        shard: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> ImageInputs | None:
        """The inputs; None without images. Raises StageError if images and tokens do not belong
        together."""
        if batch.images is None:
            return None
        if SECONDS in batch.images.tensors:
            raise CapabilityError(NO_VIDEOS)
        if AUDIO_INPUT in batch.images.tensors:
            _require_kind("audio", self.traits, "the data has audio, and this model")
        ids_T = batch.input_ids_T.numpy()
        tokens = tuple(self.traits.token_ids.values())
        image_ranges = image_places(ids_T, tokens, batch.images.token_counts)
        index_T = torch.from_numpy(feature_index(image_ranges, len(ids_T)))
        tensors = batch.images.repeat(batch.images.to_device(device))
        return ImageInputs(tensors, to_device(shard(index_T), device))

    def unused(self) -> list[nn.Parameter]:
        """None: parameters without a gradient have one of zeros."""
        return []


def build_image_text_inputs(config: AutoModelConfig) -> ImageTextInputs | None:
    """What builds the media's inputs; None for a text model."""
    traits = config.outline.media
    return ImageTextInputs(traits) if traits else None


def check_image_text(
    run: RunConfig, hf_config: Mapping[str, Any], config: AutoModelConfig, *, images: bool
) -> None:
    """Raise ConfigError or CapabilityError for images, or settings of them, that a model of the
    transformers backend cannot honour."""
    parts, model_type = run.model.freeze, hf_config.get("model_type")
    if config.outline.media is None:
        if images:
            raise CapabilityError(
                f"the data has images, and a {model_type} is a text model.\n"
                "  Use a model that takes images, or data without them."
            )
        if parts is not None:
            raise ConfigError(
                f"model.freeze is {parts}, and a {model_type} is a text model: it has no such"
                " parts.\n  Leave model.freeze out."
            )
        return
    if config.outline.media.absent and images:
        raise CapabilityError(
            f"the data has images or audio, and a {model_type} is trained on text alone: {WHY}.\n"
            "  Use another model, or data without them."
        )
    require_trained(parts, images=images)
    if images and run.data.encode_images:
        raise ConfigError(
            f"data.encode_images is true, and a {model_type} is trained through transformers' own"
            " code, which computes the features itself.\n  Leave encode_images out."
        )


def require_trained(frozen: Sequence[Part] | None, *, images: bool) -> None:
    """Raise ConfigError if all parts that data without images trains are frozen."""
    if "language" in (frozen or ()) and not images:
        raise ConfigError(
            f"model.freeze is {frozen}, and the data has no images: nothing would be trained.\n"
            "  Leave language out, or use data with images."
        )


def require_audio(hf_config: Mapping[str, Any], config: DecoderConfig) -> None:
    """Raise CapabilityError for a model that is not trained on audio."""
    model_type = hf_config.get("model_type")
    if not isinstance(config, AutoModelConfig):
        raise CapabilityError(
            f"Models of type {model_type} are trained on text, or text and images.\n"
            "  Write model.backend: transformers if the model takes audio, or use data without it."
        )
    traits = config.outline.media or MediaTraits({})
    _require_kind("audio", traits, f"A {model_type}")


def _require_kind(kind: str, traits: MediaTraits, model: str) -> None:
    if kind not in traits.token_ids:
        why = f": {traits.refused[kind]}" if kind in traits.refused else ""
        raise CapabilityError(
            f"{model} is not trained on {kind}{why}.\n"
            f"  Use a model that takes {kind}, or data without it."
        )


def freeze_image_text(run: RunConfig, model: AutoCausalLM, *, images: bool) -> None:
    """Freeze the parts of an image-text model that `model.freeze` names, and without images all
    but the language model, in place."""
    if model.config.outline.media is None:
        return
    model.has_images = images
    model.freeze(frozen_parts(run) if images else ("vision", "projector"))
    for layer in () if images else layers_of_images(model):
        layer.requires_grad_(False)
