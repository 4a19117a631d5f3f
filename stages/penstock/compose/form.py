"""What a composed model consists of, by its projector."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.compose.parts import Encoder
from penstock.models.initialize import generator_for

if TYPE_CHECKING:
    import torch

IMAGE_TOKEN = "<image>"

DROPPED = {"architectures", "transformers_version"}
"""Entries of a part's config.json that its config in the whole has not."""


class Form(ABC):
    """The multimodal model type of a composed model."""

    model_type: ClassVar[str]
    tokens: ClassVar[tuple[str, ...]] = (IMAGE_TOKEN,)
    """The tokens that its processor writes for an image."""

    @abstractmethod
    def vision_entries(self, encoder: Encoder) -> dict[str, Any]:
        """The entries of the whole's config.json that the vision tower determines.

        Raises CapabilityError for a tower that such a model does not have.
        """

    @abstractmethod
    def token_entries(self, token: int) -> dict[str, Any]:
        """The entry of the whole's config.json that names the image token."""

    @abstractmethod
    def vision_tensors(
        self, encoder: Encoder, hf_config: Mapping[str, Any], seed: int
    ) -> "dict[str, torch.Tensor]":
        """The tensors of the vision tower by their names in the whole."""

    @abstractmethod
    def projector_tensors(
        self, hf_config: Mapping[str, Any], seed: int
    ) -> "dict[str, torch.Tensor]":
        """The random tensors of the projector by their names in the whole."""

    @abstractmethod
    def preprocessor(self, encoder: Encoder, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """The preprocessor_config.json of the whole."""

    @abstractmethod
    def processor(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """The processor_config.json of the whole."""


def drawn_matrix(
    name: str, rows: int, columns: int, hf_config: Mapping[str, Any], seed: int
) -> "torch.Tensor":
    """Initial values of a projector's matrix, as those of the text model's matrices."""
    import torch  # noqa: PLC0415

    std = hf_config["text_config"].get("initializer_range", 0.02)
    return torch.empty(rows, columns).normal_(std=std, generator=generator_for(name, seed))
