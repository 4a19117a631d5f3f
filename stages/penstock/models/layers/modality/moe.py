"""Mixture of experts with a router and experts of its own for each modality, as in ERNIE-4.5-VL.

T tokens, of which N are of text and M of images; D model width, K experts per token.
"""

from typing import Any

import torch

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.layers.modality.tokens import current_modalities
from penstock.models.layers.moe import MoE


class ModalityMoE(MoE):
    """A `MoE` for the tokens of text, with a second one, `image`, for those of images; the shared
    experts are those of all tokens.

    Both are called in every pass of a model with images, even without a token: under expert and
    data parallelism all ranks must then communicate equally often.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, of_images: ExpertsConfig, **kwargs: Any
    ) -> None:
        """`kwargs` as in `MoE`."""
        super().__init__(config, experts, **kwargs)
        self.image = MoE(config, of_images, **kwargs)
        self.image.gate.is_observed = False

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        tokens = current_modalities()
        if tokens is None:
            return super().forward(x_TD)
        choice_TK, weights_TK = self.gate(x_TD)
        text_ND, choice_NK, weights_NK = (
            tensor.index_select(0, tokens.text) for tensor in (x_TD, choice_TK, weights_TK)
        )
        text_ND = self.finish_dispatch(self.dispatch(text_ND, choice_NK, weights_NK, self.experts))
        image_MD = self.image(x_TD.index_select(0, tokens.images))
        y_TD = torch.empty_like(x_TD, dtype=text_ND.dtype)
        y_TD = y_TD.index_copy(0, tokens.text, text_ND).index_copy(0, tokens.images, image_MD)
        return y_TD if self.shared is None else y_TD + self.run_shared(self.shared, x_TD)


def build_moe(config: DecoderConfig, experts: ExpertsConfig, **kwargs: Any) -> MoE:
    """The MoE layer that the config defines; `kwargs` as in `MoE`."""
    if of_images := experts.of_images:
        return ModalityMoE(config, experts, of_images, **kwargs)
    return MoE(config, experts, **kwargs)
