"""The vision part of a multimodal model: transformers' own modules, and its features at the image
tokens. T tokens of this rank, F image features, D width of the language model."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from penstock.core.errors import CapabilityError
from penstock.models.automodel.build import computed_buffers
from penstock.models.automodel.media.inputs import with_each_counted
from penstock.models.multimodal import BACKBONE
from penstock.models.vision.features import SECONDS, stored_features
from penstock.models.vision.types import VISION, VisionConfig

GatherFeatures = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From features of this rank's images, of each kind [F, D], to those of all."""


@dataclass(frozen=True)
class ImageInputs:
    """Images of a micro-batch, and the tokens that take their features; device tensors."""

    tensors: Mapping[str, torch.Tensor]
    """Arguments of `get_image_features`."""
    feature_index_T: torch.Tensor  # noqa: N815 - T names the dimension
    """The index of each token's feature, int64 [T]; -1 for other tokens."""
    gather: GatherFeatures | None = None
    """Gathers the features of the images of all ranks that divide them; None: these are all."""


@dataclass(frozen=True)
class ImageFeatures:
    """The features of a micro-batch's images, and the tokens that take them."""

    features_FD: torch.Tensor  # noqa: N815 - F and D name the dimensions
    deepstack: tuple[torch.Tensor, ...]
    """The features [F, D] that are added after each of the first decoder layers."""
    feature_index_T: torch.Tensor  # noqa: N815 - T names the dimension
    local_share: Callable[[torch.Tensor], torch.Tensor] | None = None
    """This rank's part of a per-token tensor, where the residual stream is split."""

    def at_tokens(self, index_T: torch.Tensor) -> "ImageFeatures":
        """The same features at other tokens: `index_T` is as `ImageInputs.feature_index_T`."""
        # What it pads with, 0, stands for no feature.
        own_T = self.local_share(index_T + 1) - 1 if self.local_share else index_T
        return replace(self, feature_index_T=own_T)

    @cached_property
    def _is_image_T1(self) -> torch.Tensor:  # noqa: N802
        return (self.feature_index_T >= 0)[:, None]

    def _of_tokens(self, features_FD: torch.Tensor) -> torch.Tensor:
        # Tokens without a feature take the first one, which the callers mask: -1 is no index.
        return features_FD.index_select(0, self.feature_index_T.clamp(min=0))

    def replace(self, x_TD: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The embeddings with features, times `scale`, at the image tokens, [T, D]. Where there are
        none, all gradients of the vision part are zeros, not absent."""
        features_TD = self._of_tokens(self.features_FD).to(x_TD.dtype)
        if scale != 1:
            features_TD = features_TD * scale
        return torch.where(self._is_image_T1, features_TD, x_TD)

    def add(self, x_TD: torch.Tensor, layer: int) -> torch.Tensor:
        """The hidden states after a decoder layer, with its features added at the image tokens."""
        if layer >= len(self.deepstack):
            return x_TD
        more_TD = self._of_tokens(self.deepstack[layer]).to(x_TD.dtype)
        return x_TD + more_TD.masked_fill(~self._is_image_T1, 0)


class VisionTower(nn.Module):
    """The vision tower and projector of a multimodal model of transformers.

    Its submodules and parameters are those of transformers' model class without the language model,
    under the same names. Built on the meta device; buffers keep their computed values through `to`
    and `to_empty`.
    """

    def __init__(self, config: VisionConfig) -> None:
        """Raises CapabilityError if transformers cannot build the model."""
        super().__init__()
        model = _build_meta(config)
        # In a list, so that the model is not a submodule of itself.
        self._hf = [model]
        self.config = config
        self.local_share: Callable[[torch.Tensor], torch.Tensor] | None = None
        """This rank's part of a per-token tensor, where the residual stream is split."""
        # On the CPU even if the decoder is built on the meta device: the values are needed now.
        with torch.device("cpu"):
            self.buffer_values = computed_buffers(model)
        for name, module in model.named_children():
            self.add_module(name, module)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def hf_model(self) -> Any:
        return self._hf[0]

    @property
    def blocks(self) -> list[nn.Module]:
        from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415

        return [
            module for module in self.modules() if isinstance(module, GradientCheckpointingLayer)
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        # The shapes of the parameters by their names in a decoder, for a `WeightMap`.
        return {VISION + name: tuple(param.shape) for name, param in self.named_parameters()}

    def forward(self, images: ImageInputs) -> ImageFeatures:
        """The features of the images, computed or stored."""
        features_FD, deepstack = stored_features(self, images.tensors) or self.compute(
            images.tensors
        )
        if images.gather:
            features_FD, *deepstack = images.gather((features_FD, *deepstack))
        index_T = images.feature_index_T
        features = ImageFeatures(features_FD, tuple(deepstack), index_T, self.local_share)
        return features.at_tokens(index_T)

    def compute(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(features [F, D] of images and videos, those that are added after decoder layers)."""
        # FSDP puts what it gathered into this module alone.
        self.hf_model._parameters.update(self._parameters)
        inputs = with_each_counted(
            {name: tensor for name, tensor in tensors.items() if name != SECONDS}
        )
        outputs = self.hf_model.get_image_features(**inputs, return_dict=True)
        deepstack = getattr(outputs, "deepstack_features", None) or ()
        return _flat(outputs.pooler_output), tuple(map(_flat, deepstack))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "VisionTower":
        # Move or convert parameters, then restore the buffers, which `to_empty` leaves undefined
        # and `to` may round.
        super()._apply(fn, recurse)
        # The model, which is no submodule, would keep the Parameters of the meta device.
        self._hf[0]._parameters.update(self._parameters)
        for name, value in self.buffer_values.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            held = module._buffers[leaf]
            assert held is not None, f"{name} was computed"
            module._buffers[leaf] = value.to(held.device)
        return self


def _flat(features: Any) -> torch.Tensor:
    # The features of all images, [F, D]: of a list with those of each, or of a batch.
    flat = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    return flat.flatten(0, -2)


def _build_meta(config: VisionConfig) -> Any:
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - takes seconds

    values = deepcopy(dict(config.hf_config))
    try:
        hf = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = AutoModel.from_config(hf, dtype=torch.float32)
    except Exception as error:  # What a model's constructor may raise is not known.
        raise CapabilityError(
            f"transformers cannot build the vision part of {config.hf_config.get('model_type')}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    delattr(model, config.backbone.removeprefix(BACKBONE).rstrip("."))
    return model.train()
