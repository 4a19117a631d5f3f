"""Expand images of clients: a file to the outputs of the model's image processor, and to the tokens
that stand for it.

Both are those of `prepare`: the tokens are the text that the processor writes in place of the image
token of the chat template. What the template writes around that token is the client's text.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import ConfigError
from penstock.media.decode import decode, read_header
from penstock.media.kinds import BadMedia
from penstock.media.processor import ImageProcessor, load_image_processor
from penstock.rows.tokenizer import load_tokenizer
from penstock.server.api.wire.chunks import ExpandedImage
from penstock.server.protocol.images import Image, ImageTensor

FORMATS = {"png": ("PNG",), "jpeg": ("JPEG", "MPO")}
"""The formats of clients, and those that Pillow finds in their files."""


@dataclass(frozen=True)
class ProcessorExpander:
    """An `ImageExpander`."""

    processor: ImageProcessor
    tokenizer: PreTrainedTokenizerBase

    @property
    def has_two_forms(self) -> bool:
        return self.processor.has_two_forms

    def expand(
        self, content: bytes, format: str, digest: bytes, *, several: bool = False
    ) -> ExpandedImage:
        """Process a file. Raises BadMedia if it cannot be used or is of another format."""
        if format not in FORMATS:
            raise BadMedia(f"its format is {format[:50]!r}; it may be {' or '.join(FORMATS)}")
        actual = read_header(content).format
        if actual not in FORMATS[format]:
            raise BadMedia(f"its format is {format}, and the file is {actual}")
        try:
            tensors = self.processor.process(decode(content), several=several)
        except (BadMedia, MemoryError):
            raise
        except Exception as error:  # What a processor may raise is not known.
            raise BadMedia(f"the image processor failed: {type(error).__name__}") from error
        text = self.processor.replacement(tensors)
        tokens = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        used = {
            name: ImageTensor.of(tensor)
            for name, tensor in tensors.items()
            if name not in self.processor.unused
        }
        count = int(np.count_nonzero(tokens == self.processor.token_id))
        return ExpandedImage(Image(digest=digest, tensors=used, num_tokens=count), tokens)


def load_expander(folder: str) -> ProcessorExpander:
    """The image processor and tokenizer in a folder. Raises ConfigError if there is no image
    processor or it cannot be used, CapabilityError if it is not supported or Pillow is not
    installed."""
    tokenizer = load_tokenizer(folder)
    processor = load_image_processor(folder, None, tokenizer)
    if processor is None:
        raise ConfigError(
            f"{folder} has no image processor.\n"
            "  Write a tokenizer_path with preprocessor_config.json beside the tokenizer."
        )
    return ProcessorExpander(processor, tokenizer)
