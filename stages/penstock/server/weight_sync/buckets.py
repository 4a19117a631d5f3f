"""Buckets of weight sync: tensors in order, grouped by size.

Tensors have Hugging Face names, and each bucket is one request. A bucket is filled a few tensors at
a time, so peak memory is little more than the bucket.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.hf.state_dict import HFStateDict
from penstock.server.weight_sync.block_fp8 import SCALES, scales_shape, tiles

STRETCH = 64 << 20
"""Bytes in fp32 of the tensors that are gathered at a time."""


@dataclass(frozen=True)
class Sent:
    """A tensor to send."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model."""

    weights: HFStateDict
    dtype: torch.dtype
    """The dtype of all tensors that are neither kept exact nor quantized."""
    quantized: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Shapes of the weights sent in FP8."""

    def sent(self, name: str) -> list[Sent]:
        """The tensors of a weight."""
        shape = self.weights.shapes[name]
        if name in self.quantized:
            return [
                Sent(name, shape, torch.float8_e4m3fn),
                Sent(f"{name}{SCALES}", scales_shape(shape), torch.float32),
            ]
        exact = name in self.weights.exact
        return [Sent(name, shape, torch.float32 if exact else self.dtype)]

    def buckets(self, most: int) -> list[list[str]]:
        """All weights in model order, in buckets of at most `most` bytes, or of one larger
        weight."""
        found: list[list[str]] = []
        left = 0
        for name in self.weights.shapes:
            size = sum(one.nbytes for one in self.sent(name))
            if not found or size > left:
                found.append([])
                left = most
            found[-1].append(name)
            left -= size
        return found

    def tensors(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The tensors of `sent` for these weights, concatenated."""
        return [made for batch in self._batches(names) for made in self._made(batch)]

    def _batches(self, names: Collection[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        left = STRETCH
        for name in names:
            size = 4 * torch.Size(self.weights.shapes[name]).numel()
            if batch and size > left:
                yield batch
                batch, left = [], STRETCH
            batch.append(name)
            left -= size
        if batch:
            yield batch

    def _made(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        read = self.weights.read(names)
        for name in names:
            tensor = read.pop(name)
            if name in self.quantized:
                yield from tiles(name, tensor)
            else:
                yield tensor.to(self.sent(name)[0].dtype)
