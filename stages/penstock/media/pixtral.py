"""Pixtral's processor, whose class in transformers imports torchvision for one function of sizes.
The image processor is transformers' own."""

from collections.abc import Mapping
from typing import Any

from transformers.processing_utils import ProcessorMixin


class PixtralProcessor(ProcessorMixin):
    """The part of `transformers.PixtralProcessor` that concerns single images."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.side = patch_size * spatial_merge_size
        """Pixels along a side of the square of one image token."""
        self.image_token = image_token
        self.image_break_token, self.image_end_token = image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    @property
    def image_options(self) -> Mapping[str, Any]:
        """Further keyword arguments of the image processor: images are resized to whole squares."""
        return {"patch_size": self.side}

    def replace_image_token(
        self, image_inputs: Mapping[str, Any], image_idx: int, **options: Any
    ) -> str:
        """A token for each square, with one that ends each row, and another one the last."""
        del options
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * int(width // self.side) + self.image_break_token
        rows = row * int(height // self.side)
        return rows.removesuffix(self.image_break_token) + self.image_end_token
