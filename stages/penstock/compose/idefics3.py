"""Idefics3: features of a SigLIP tower, of which each square of neighbours is joined to one (pixel
shuffle), through a linear map (Laurençon et al. 2024, "Building and better understanding
vision-language models").

Its vision tower is SigLIP under another name, so that the features are those of SigLIP, of its last
layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from penstock.compose.form import IMAGE_TOKEN, Form, drawn_matrix
from penstock.compose.parts import Encoder
from penstock.core.errors import CapabilityError

TOWERS = ("siglip", "siglip_vision_model")
"""By the `model_type` of an encoder's config.json."""

WHY_NOT: Mapping[str, str] = {
    "clip": "a class token, and a norm before its first layer",
    "clip_vision_model": "a class token, and a norm before its first layer",
    "dinov2": "a class token, and scales of its layers",
}
"""What other towers have that Idefics3's has not."""

SHARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_channels", "image_size", "patch_size", "hidden_act", "layer_norm_eps"),
    "attention_dropout",
)
"""Fields of a SigLIP's config that Idefics3's tower has."""

# How images are prepared where the encoder's preprocessor_config.json does not say it: as SigLIP's
# image processor does.
PREPARED: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
}

POOLS = "head."
"""Beginning of the names of what pools SigLIP's features to one."""


@dataclass(frozen=True)
class Idefics3(Form):
    """An Idefics3 whose images are one square each."""

    model_type: ClassVar[str] = "idefics3"
    tokens: ClassVar[tuple[str, ...]] = (
        IMAGE_TOKEN,
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
    )

    scale_factor: int
    """Side of the square of features that become one."""

    def vision_entries(self, encoder: Encoder) -> dict[str, Any]:
        model_type = str(encoder.read().get("model_type"))
        if model_type not in TOWERS:
            why = WHY_NOT.get(model_type)
            has = f", which has {why}; Idefics3's tower has not" if why else ""
            raise CapabilityError(
                f"{encoder.config} is of type {model_type}{has}.\n  With projector: pixel_shuffle,"
                f" name a vision tower of type {' or '.join(TOWERS)}; others with projector: mlp."
            )
        vision = encoder.vision_config(TOWERS[-1])
        grid_size = vision["image_size"] // vision["patch_size"]
        if grid_size % self.scale_factor:
            fit = [n for n in range(2, grid_size + 1) if grid_size % n == 0]
            raise CapabilityError(
                f"scale_factor is {self.scale_factor}, and {encoder.config} has {grid_size}"
                " features along the side of an image, which it does not divide.\n"
                f"  Write one of: {', '.join(map(str, fit))}."
            )
        entries = {"model_type": "idefics3_vision", **{name: vision[name] for name in SHARED}}
        _require_positions(entries, encoder)
        if encoder.read_preprocessor().get("do_center_crop"):
            raise CapabilityError(
                f"{encoder.config} crops images (do_center_crop in its preprocessor_config.json),"
                " which Idefics3's image processor does not.\n  Write projector: mlp, or a"
                " preprocessor that resizes images to a square."
            )
        return {"vision_config": entries, "scale_factor": self.scale_factor}

    def token_entries(self, token: int) -> dict[str, Any]:
        return {"image_token_id": token}

    def vision_tensors(
        self, encoder: Encoder, hf_config: Mapping[str, Any], seed: int
    ) -> dict[str, torch.Tensor]:
        del hf_config
        tensors = encoder.tensors(encoder.vision_config(TOWERS[-1]), seed)
        return {
            f"model.vision_model.{name}": tensor
            for name, tensor in tensors.items()
            if not name.startswith(POOLS)
        }

    def projector_tensors(self, hf_config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
        name = "model.connector.modality_projection.proj.weight"
        inputs = hf_config["vision_config"]["hidden_size"] * self.scale_factor**2
        outer = hf_config["text_config"]["hidden_size"]
        return {name: drawn_matrix(name, outer, inputs, hf_config, seed)}

    def preprocessor(self, encoder: Encoder, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        entries = encoder.read_preprocessor()
        size = {"longest_edge": hf_config["vision_config"]["image_size"]}
        return {
            **{name: entries.get(name, usual) for name, usual in PREPARED.items()},
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            # Each image is resized once, to the square of the tower.
            "do_resize": False,
            "size": size,
            "max_image_size": size,
        }

    def processor(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        vision = hf_config["vision_config"]
        features_per_side = vision["image_size"] // vision["patch_size"] // self.scale_factor
        return {"processor_class": "Idefics3Processor", "image_seq_len": features_per_side**2}


def _require_positions(vision: Mapping[str, Any], encoder: Encoder) -> None:
    """Raise CapabilityError unless Idefics3's tower gives the patches of an image the positions
    that SigLIP gives them: it computes them from fractions of the side, which may round."""
    from transformers.models.idefics3 import (  # noqa: PLC0415 - takes seconds
        configuration_idefics3,
        modeling_idefics3,
    )

    grid_size = vision["image_size"] // vision["patch_size"]
    config = configuration_idefics3.Idefics3VisionConfig(
        hidden_size=1, num_channels=1, image_size=grid_size, patch_size=1
    )
    embeddings = modeling_idefics3.Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        # Position p is embedded as the number p and every patch as 0, so the output is the
        # positions.
        embeddings.position_embedding.weight.copy_(torch.arange(grid_size**2)[:, None])
        embeddings.patch_embedding.weight.zero_()
        assert embeddings.patch_embedding.bias is not None
        embeddings.patch_embedding.bias.zero_()
        embedded = embeddings(
            torch.zeros(1, 1, grid_size, grid_size),
            torch.ones(1, grid_size, grid_size, dtype=torch.bool),
        )
    if not torch.equal(embedded.flatten(), torch.arange(grid_size**2, dtype=embedded.dtype)):
        raise CapabilityError(
            f"{encoder.config} has {grid_size} x {grid_size} patches in an image, to which"
            " Idefics3's tower gives other positions than SigLIP's.\n  Write projector: mlp."
        )
