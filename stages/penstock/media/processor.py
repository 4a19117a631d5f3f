"""The image processor of a model: one image to tensors, and to the text that stands for it.

Processors of transformers, with Pillow (`backend="pil"`) whether or not torchvision is installed,
since the two resize differently. Each image is processed alone, so that the result depends on
nothing else; zeros with which a processor pads images to the largest one of a batch are added when
they are collated.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.errors import CapabilityError, ConfigError, PenstockError
from penstock.media.bounds import UNBOUNDED, MediaBounds
from penstock.media.decode import BadImage, decode, require_pillow
from penstock.media.kinds import IMAGE, BadMedia, first_line
from penstock.media.model_processor import (
    Arrays,
    ModelProcessor,
    ProcessorFiles,
    Tensors,
    build_processor,
    processor_class,
    to_arrays,
)
from penstock.media.reference import image_digest
from penstock.rows.pixel_table import PixelTable, StoredTensor, concatenate, stored

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = "pixel_values"  # The output with the pixels

BACKEND = "pil"

AS_BYTES = {"do_rescale": False, "do_normalize": False}  # Options with which pixels stay bytes

FORMAT = 1  # Increase it if the same settings must give other tensors

# Image processors that cut images into crops of one size. An image's mask of pixels is of ones, and
# takes more memory than the image: models assume it where it is not given.
CROPS = "Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil"
MASK = "pixel_attention_mask"

NUM_IMAGES = "batch_num_images"
"""The output with the number of images of each sample, on which the others depend. Stored of each
image: 1, or 2 if its sample has several."""

FORMS = 1  # Increase it if images of samples with several must have other tensors

IN_TEXT = frozenset({"rows", "cols"})  # Outputs that tell the text alone where crops are

# Sizes of two images that show whether images are processed independently of each other.
PROBES = ((64, 96), (160, 48))


@dataclass(frozen=True)
class ImageProcessor(ModelProcessor):
    """An image processor and the parts of its processor that concern text."""

    table: PixelTable | None = None  # How its pixels are stored as bytes; None if they are not
    byte_patches: Any = None
    """The image processor with `_byte_patches`; None if its patches are others."""
    nested: bool = False
    """Whether images are given as samples of one image, `[[image], ...]`: the image processor
    concatenates what it returns for the images of a sample."""

    kind = IMAGE

    @property
    def has_two_forms(self) -> bool:
        """LLaVA-OneVision cuts no tiles from several images."""
        return NUM_IMAGES in self.processor.image_processor.model_input_names

    @property
    def _forms(self) -> tuple[bool, ...]:
        """Whether its sample has several, for each form of an image."""
        return (False, True) if self.has_two_forms else (False,)

    @cached_property
    def unused(self) -> frozenset[str]:
        return IN_TEXT.union(self.processor.unused_input_names)

    @property
    def settings(self) -> dict[str, Any]:
        images = self.processor.image_processor
        return {
            "format": FORMAT,
            "class": type(images).__name__,
            "backend": BACKEND,
            "settings": images.to_dict(),
            "options": dict(self.options),
            **({"forms": FORMS} if self.has_two_forms else {}),
        }

    def _process_file(self, digest: bytes, content: bytes) -> tuple[Tensors, tuple[int, int]]:
        alone = self.stored_digest(image_digest(content), several=False)
        image = decode(content)
        several = self.has_two_forms and digest != alone
        return self.process(image, several=several), image.size

    def process(self, image: "Image", *, several: bool = False) -> Tensors:
        """The tensors of an RGB image, alone or in a sample with several. Raises BadImage if the
        processor refuses it."""
        try:
            fast = self._process_to_bytes(image, self.table, several) if self.table else None
            arrays = {} if fast else self._run([image], several=several)
            return fast or {name: stored(array) for name, array in arrays.items()}
        except (ValueError, ZeroDivisionError) as error:
            raise BadImage(f"the image processor refuses it: {error}") from error

    def _process_to_bytes(self, image: "Image", table: PixelTable, several: bool) -> Tensors | None:
        if self.byte_patches is None:
            arrays = self._run([image], several=several, **AS_BYTES)
            codes, shape = table.encode(arrays[PIXELS]), arrays[PIXELS].shape
        else:
            arrays = to_arrays(self.byte_patches([image], **{**self.options, **AS_BYTES}))
            rows, size = arrays[PIXELS].shape
            codes = arrays[PIXELS].reshape(rows, len(table.values), -1)
            shape = (rows, size * table.repeats)
        if codes is None or codes.dtype != np.uint8:
            return None
        tensors = {name: stored(array) for name, array in arrays.items() if name != PIXELS}
        return {**tensors, PIXELS: StoredTensor(shape, codes, table)}

    def _run(self, images: list["Image"], *, several: bool = False, **options: Any) -> Arrays:
        """The outputs for images of samples with one image each, or each with `several`."""
        if not several:
            return self._call([[image] for image in images] if self.nested else images, **options)
        from PIL import Image  # noqa: PLC0415 - optional

        # The other image of each sample, whose outputs are left out.
        blank = Image.new("RGB", (1, 1))
        outputs = [self._call([[image, blank]], **options) for image in images]
        return {
            name: np.concatenate([output[name][:1] for output in outputs]) for name in outputs[0]
        }

    def _call(self, images: Sequence[Any], **options: Any) -> Arrays:
        arrays = to_arrays(self.processor.image_processor(images, **{**self.options, **options}))
        if type(self.processor.image_processor).__name__ in CROPS:
            arrays.pop(MASK, None)
        return arrays

    def replacement(self, tensors: Tensors) -> str:
        arrays = {name: tensor.stand_in() for name, tensor in tensors.items()}
        return str(self.processor.replace_image_token(arrays, image_idx=0, **self.options))

    def checked(self) -> "ImageProcessor":
        """The processor, which gets nested images if it needs them.

        Raises CapabilityError unless images are processed independently of each other, but for
        zeros with which tensors are padded to the largest ones.
        """
        for processor in (self, replace(self, nested=True)):
            if all(processor._is_independent(several=form) for form in self._forms):
                return processor
        raise CapabilityError(
            f"The image processor of {self.name} processes an image differently beside others, "
            "which is not supported."
        )

    def _is_independent(self, *, several: bool) -> bool:
        images = _probes()
        try:
            alone = [self._run([image], several=several) for image in images]
            together = self._call([images]) if several else self._run(images)
            return all(
                values.ndim
                and np.array_equal(
                    concatenate([stored(outputs[name]) for outputs in alone]), values
                )
                for name, values in together.items()
                if name != NUM_IMAGES
            )
        except (BadMedia, KeyError, ValueError):
            return False

    def with_table(self) -> "ImageProcessor":
        """The processor, with a table of pixels if it gives exactly the same tensors."""
        images = self.processor.image_processor
        does_both = all(getattr(images, name, False) for name in ("do_rescale", "do_normalize"))
        if not does_both or PIXELS not in self._run(_probes()[:1]):
            return self
        # Shape (channels, 1, 256): an image that has every byte in each channel.
        codes = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
        rescaled = images.rescale(codes, images.rescale_factor)
        values = images.normalize(rescaled, images.image_mean, images.image_std)
        table = PixelTable(values.reshape(3, 256), getattr(images, "temporal_patch_size", 1))
        fast = replace(self, table=table)
        if hasattr(images, "patchify"):
            in_bytes = copy(images)
            in_bytes.patchify = _byte_patches
            faster = replace(fast, byte_patches=in_bytes)
            if self._gives_the_same(faster):
                return faster
        return fast if self._gives_the_same(fast) else self

    def _gives_the_same(self, fast: "ImageProcessor") -> bool:
        for image, several in product(_probes(), self._forms):
            expected = self._run([image], several=several)
            try:
                tensors = fast.process(image, several=several)
            except (BadMedia, TypeError):
                return False
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            if arrays.keys() != expected.keys() or any(
                (arrays[name].dtype, arrays[name].tobytes()) != (value.dtype, value.tobytes())
                for name, value in expected.items()
            ):
                return False
        return True


def _byte_patches(
    image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[np.ndarray, int, int]:
    """(patches [patches, channels * patch_size²], their rows, their columns) of an image
    [channels, height, width]: as `patchify` of Qwen2-VL's image processor, without converting
    pixels to floats and repeating them in time."""
    del temporal_patch_size
    channels, height, width = image.shape
    rows, columns = height // patch_size, width // patch_size
    tiles = (merge_size, patch_size)
    # Shape: channels, rows / merge, merge, patch, columns / merge, merge, patch.
    blocks = image.reshape(channels, rows // merge_size, *tiles, columns // merge_size, *tiles)
    return blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1), rows, columns


def _probes() -> list["Image"]:
    """Two images of different sizes, with all values of a byte."""
    from PIL import Image  # noqa: PLC0415 - optional

    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*s, 3)).astype(np.uint8)) for s in PROBES]


def load_image_processor(
    path: str, revision: str | None, tokenizer: Any, bounds: MediaBounds = UNBOUNDED
) -> ImageProcessor | None:
    """The image processor in a folder or hub repository; None if it has none.

    `tokenizer` is the one of the same folder. Raises CapabilityError without Pillow and for
    processors that are not supported, or whose images have a fixed size in spite of `bounds`,
    ConfigError if the files cannot be used.
    """
    files = ProcessorFiles(path, revision)
    if not files.has_processor:
        return None
    require_pillow()
    from transformers import AutoImageProcessor  # noqa: PLC0415 - takes a second

    cls = processor_class(files)
    try:
        if cls is None or "image_processor" not in cls.get_attributes():
            return None
        images = AutoImageProcessor.from_pretrained(
            files.path, revision=files.revision, trust_remote_code=False, backend=BACKEND
        )
        _require_bounds(images, bounds)
        if bounds.of(IMAGE.name):
            images.size = type(images.size)(**bounds.of_size(dict(images.size)))
        processor = build_processor(cls, {"image_processor": images}, tokenizer, files)
    except ImportError as error:
        raise CapabilityError(
            f"The image processor of {path} needs further packages: {first_line(error)}\n"
            "  Install them, unless it is torchvision, which no supported one needs."
        ) from error
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The image processor of {path} cannot be loaded: {first_line(error)}"
        ) from error
    if "_pil_" not in type(images).__module__:
        raise CapabilityError(
            f"The image processor {type(images).__name__} of {path} needs torchvision; only those "
            "that need Pillow alone are supported."
        )
    merged = processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)
    more = getattr(processor, "image_options", {})
    options = {**merged["images_kwargs"], **more, "return_tensors": "np"}
    image_processor = ImageProcessor(processor, options, bounds=bounds)
    _require_supported(image_processor)
    return image_processor.checked().with_table()


def _require_bounds(images: Any, bounds: MediaBounds) -> None:
    own = bounds.of(IMAGE.name)
    edges = {"shortest_edge", "longest_edge"}
    has_grid = "image_grid_thw" in images.model_input_names
    if own and not (has_grid and edges <= {*dict(type(images).size or {})}):
        raise CapabilityError(
            f"{' and '.join(own)}: the image processor {type(images).__name__} has images of other "
            "sizes than between two numbers of pixels.\n  Leave them out; its file says the size."
        )


def _require_supported(images: ImageProcessor) -> None:
    """Raise CapabilityError for processors that treat the images of a text as a whole."""
    from transformers.processing_utils import ProcessorMixin  # noqa: PLC0415

    cls = type(images.processor)
    has_own = cls._process_images is not ProcessorMixin._process_images
    if has_own or cls.replace_image_token is ProcessorMixin.replace_image_token:
        raise CapabilityError(
            f"Images cannot be processed one by one with {images.name}, which is not supported."
        )
    images.require_token()
