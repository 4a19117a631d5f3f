"""LLaVA: features of a vision tower through a projector of two layers (Liu et al. 2023, "Visual
Instruction Tuning")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from penstock.compose.form import DROPPED, IMAGE_TOKEN, Form, drawn_matrix
from penstock.compose.parts import Encoder
from penstock.core.errors import CapabilityError


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

LINEAR = "linear"
PROJECTOR = "model.multi_modal_projector"


@dataclass(frozen=True)
class Llava(Form):
    """A LLaVA model."""

    model_type: ClassVar[str] = "llava"

    activation: str
    """Between the two layers of the projector."""

    def vision_entries(self, encoder: Encoder) -> dict[str, Any]:
        model_type = str(encoder.read().get("model_type"))
        tower = TOWERS.get(model_type)
        if tower is None:
            raise CapabilityError(
                f"{encoder.config} is of type {model_type}, and a vision tower is one of: "
                f"{', '.join(TOWERS)}."
            )
        vision = encoder.vision_config(tower.vision_type)
        return {
            "vision_config": {n: value for n, value in vision.items() if n not in DROPPED},
            "projector_hidden_act": self.activation,
            # The last layer of a published tower was trained for another task.
            "vision_feature_layer": -2 if encoder.weights else -1,
            "vision_feature_select_strategy": "default" if tower.has_class_token else "full",
        }

    def token_entries(self, token: int) -> dict[str, Any]:
        return {"image_token_index": token}

    def vision_tensors(
        self, encoder: Encoder, hf_config: Mapping[str, Any], seed: int
    ) -> dict[str, torch.Tensor]:
        tensors = encoder.tensors(hf_config["vision_config"], seed)
        return {f"model.vision_tower.{name}": tensor for name, tensor in tensors.items()}

    def projector_tensors(self, hf_config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
        outer = hf_config["text_config"]["hidden_size"]
        tensors: dict[str, torch.Tensor] = {}
        widths = {"linear_1": hf_config["vision_config"]["hidden_size"], "linear_2": outer}
        for layer, inputs in widths.items():
            name = f"{PROJECTOR}.{layer}.weight"
            tensors[name] = drawn_matrix(name, outer, inputs, hf_config, seed)
            tensors[f"{PROJECTOR}.{layer}.bias"] = torch.zeros(outer)
        # The second layer of a linear projector is the identity at first, so that the two are one
        # layer of the usual initial values.
        if self.activation == LINEAR:
            tensors[f"{PROJECTOR}.linear_2.weight"] = torch.eye(outer)
        return tensors

    def preprocessor(self, encoder: Encoder, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        del hf_config
        return encoder.read_preprocessor()

    def processor(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        select = hf_config["vision_feature_select_strategy"]
        return {
            "processor_class": "LlavaProcessor",
            "patch_size": hf_config["vision_config"]["patch_size"],
            "num_additional_image_tokens": int(select == "default"),
            "vision_feature_select_strategy": select,
            "image_token": IMAGE_TOKEN,
        }
