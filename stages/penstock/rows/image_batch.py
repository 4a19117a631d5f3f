"""Images, audio and videos of a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from penstock.rows.pixel_table import StoredTensor, concatenate
from penstock.rows.reader import RowImage
from penstock_kernels.to_device import to_device


@dataclass(frozen=True)
class PixelBytes:
    """A tensor of pixels as bytes (`rows.pixel_table.PixelTable`). R rows, C channels, P pixels."""

    codes_RCP: torch.Tensor  # noqa: N815 - the capitals name the dimensions
    """uint8."""
    values_CB: torch.Tensor  # noqa: N815 - the capitals name the dimensions
    """The values of the 256 bytes, float32."""
    repeats: int
    """How often each channel is repeated in a row."""
    shape: tuple[int, ...]
    """Shape of the tensor."""

    def rows(self, start: int, end: int) -> "PixelBytes":
        """Some of the rows."""
        return replace(
            self, codes_RCP=self.codes_RCP[start:end], shape=(end - start, *self.shape[1:])
        )

    def pin_memory(self) -> "PixelBytes":
        """A copy in pinned memory, for asynchronous copies to the GPU."""
        return replace(self, codes_RCP=self.codes_RCP.pin_memory())

    def to_device(self, device: torch.device) -> torch.Tensor:
        """The tensor, whose values are looked up on `device`, float32."""
        # The bytes cross the bus; uint8 could not hold the offsets of further channels.
        codes_RCP = to_device(self.codes_RCP, device).to(torch.int32)
        values = to_device(self.values_CB, device).flatten()
        rows, channels, pixels = codes_RCP.shape
        firsts_C1 = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=device)[:, None]
        gathered = values.index_select(0, (codes_RCP + firsts_C1).flatten())
        values_RC1P = gathered.view(rows, channels, 1, pixels)
        return values_RC1P.expand(-1, -1, self.repeats, -1).reshape(self.shape)


@dataclass(frozen=True)
class ImageBatch:
    """The images, audio and videos of a micro-batch. One that several documents have is in it once.

    A sample has the model's image token (`image_token_id`) once for each feature of its images: the
    k-th image token of a micro-batch takes the feature `feature_order()[k]`. So it is with audio
    and video and their tokens.
    """

    tensors: Mapping[str, torch.Tensor]
    """Outputs of the model's image processor for all distinct images, by the names under which
    `get_image_features` takes them: `pixel_values` [patches, patch size] and `image_grid_thw`
    [images, 3], or `pixel_values` [images, channels, height, width]; videos are images of several
    frames; of audio, `input_features` [chunks, mel bins, frames]. Without those in `pixels`."""
    token_counts: tuple[int, ...]
    """Number of tokens of each image or audio, in the order of their tokens."""
    pixels: Mapping[str, PixelBytes] = field(default_factory=dict[str, PixelBytes])
    """Further outputs, as bytes: fewer are read, and copied to the device."""
    order: tuple[int, ...] | None = None
    """Which of the distinct images each is; None: all are distinct."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Length of each distinct image along the first dimension, by output; 0 without it."""

    def __len__(self) -> int:
        return len(self.token_counts)

    @classmethod
    def concatenate(cls, images: Sequence[RowImage]) -> "ImageBatch | None":
        """Copy the tensors of the images, each image once; None without images.

        Tensors are concatenated along their first dimension. Those of images of different sizes are
        padded with zeros to the largest: models that take such images read their sizes, or their
        numbers of tiles, from another tensor.
        """
        if not images:
            return None
        tensors, pixels = dict[str, torch.Tensor](), dict[str, PixelBytes]()
        distinct, order = _distinct(images)
        sizes = dict[str, tuple[int, ...]]()
        for name in dict.fromkeys(name for image in distinct for name in image.tensors):
            parts = [image.tensors[name] for image in distinct if name in image.tensors]
            sizes[name] = tuple(
                image.tensors[name].shape[0] if name in image.tensors else 0 for image in distinct
            )
            stacked = _concatenate_bytes(parts)
            if stacked is None:
                tensors[name] = torch.from_numpy(concatenate(parts))
            else:
                pixels[name] = stacked
        counts = tuple(image.num_tokens for image in images)
        return cls(tensors, counts, pixels, order if len(distinct) < len(images) else None, sizes)

    @property
    def distinct_counts(self) -> tuple[int, ...]:
        """Number of features of each distinct image."""
        if self.order is None:
            return self.token_counts
        counts = dict(zip(self.order, self.token_counts, strict=True))
        return tuple(counts[image] for image in range(len(counts)))

    def feature_order(self) -> np.ndarray:
        """The feature of each image token, int64, of the features of the distinct images."""
        if self.order is None:
            return np.arange(sum(self.token_counts))
        starts = np.cumsum([0, *self.distinct_counts])
        features = [np.arange(starts[image], starts[image + 1]) for image in self.order]
        return np.concatenate(features)

    def of_each(self, distinct: np.ndarray) -> np.ndarray:
        """Rows of distinct images as rows of each image, in the order of their tokens."""
        return distinct if self.order is None else distinct[list(self.order)]

    def number_of_each(self, name: str, default: float) -> list[float]:
        """The number in output `name` of each image, in the order of their tokens; `default` of
        those without it."""
        image_sizes = iter(self.tensors[name].tolist() if name in self.tensors else ())
        sizes = self.sizes.get(name, (0,) * len(self))
        distinct = np.array([next(image_sizes) if size else default for size in sizes])
        return self.of_each(distinct).tolist()

    def pin_memory(self) -> "ImageBatch":
        """A copy in pinned memory, for asynchronous copies to the GPU."""
        return replace(
            self,
            tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()},
            pixels={name: pixel.pin_memory() for name, pixel in self.pixels.items()},
        )

    def repeat(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Tensors of the distinct images as those of each image, in the order of their tokens."""
        if self.order is None:
            return tensors
        parts = {name: tensor.split(self.sizes[name]) for name, tensor in tensors.items()}
        return {
            name: torch.cat([part[index] for index in self.order]) for name, part in parts.items()
        }

    def take(self, images: range) -> "ImageBatch":
        """Some of the distinct images, which are consecutive."""

        def rows(name: str) -> tuple[int, int]:
            sizes = self.sizes[name]
            return sum(sizes[: images.start]), sum(sizes[: images.stop])

        part = slice(images.start, images.stop)
        return ImageBatch(
            {name: tensor[slice(*rows(name))] for name, tensor in self.tensors.items()},
            self.distinct_counts[part],
            {name: pixel.rows(*rows(name)) for name, pixel in self.pixels.items()},
            sizes={name: size[part] for name, size in self.sizes.items()},
        )

    def to_device(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All tensors of the distinct images, on `device`."""
        tensors = {name: to_device(tensor, device) for name, tensor in self.tensors.items()}
        return tensors | {name: pixel.to_device(device) for name, pixel in self.pixels.items()}


def _distinct(images: Sequence[RowImage]) -> tuple[list[RowImage], tuple[int, ...]]:
    distinct: list[RowImage] = []
    index_by_digest: dict[bytes, int] = {}
    order: list[int] = []
    for image in images:
        index = (
            len(distinct)
            if image.digest is None
            else index_by_digest.get(image.digest, len(distinct))
        )
        if index == len(distinct):
            distinct.append(image)
            if image.digest is not None:
                index_by_digest[image.digest] = index
        order.append(index)
    return distinct, tuple(order)


def _concatenate_bytes(parts: Sequence[StoredTensor]) -> PixelBytes | None:
    """The bytes of all images; None if one has none, or would be padded: no byte stands for 0."""
    table = parts[0].table
    if table is None or len({part.shape[1:] for part in parts}) > 1:
        return None
    for part in parts[1:]:
        if part.table is not table and (part.table is None or part.table != table):
            return None
    return PixelBytes(
        torch.from_numpy(np.concatenate([part.content for part in parts])),
        # A copy: torch warns of arrays that cannot be written, as those of a mapped file.
        torch.from_numpy(table.values.copy()),
        table.repeats,
        (sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
    )
