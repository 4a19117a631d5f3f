"""Buckets of weight sync: tensors in order, grouped by size.

Tensors have Hugging Face names, and each bucket is one request. A bucket is filled a few tensors at
a time, so peak memory is little more than the bucket.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.hf.state_dict import HFStateDict
from penstock.server.weight_sync.block_fp8 import SCALES, scales_shape, tiles

GATHER_BYTES = 64 << 20  # Bytes in fp32 of the tensors that are gathered at a time


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to send."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model."""

    weights: HFStateDict
    dtype: torch.dtype  # The dtype of all tensors that are neither kept exact nor quantized
    quantized: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Shapes of the weights sent in FP8."""

    def tensor_specs(self, name: str) -> list[TensorSpec]:
        """The tensors of a weight."""
        shape = self.weights.shapes[name]
        if name in self.quantized:
            return [
                TensorSpec(name, shape, torch.float8_e4m3fn),
                TensorSpec(f"{name}{SCALES}", scales_shape(shape), torch.float32),
            ]
        return [TensorSpec(name, shape, self.weights.dtypes.get(name, self.dtype))]

    def buckets(self, max_bytes: int) -> list[list[str]]:
        """All weights in model order, in buckets of `max_bytes`, or of one larger weight."""
        buckets: list[list[str]] = []
        free_bytes = 0
        for name in self.weights.shapes:
            size = sum(spec.nbytes for spec in self.tensor_specs(name))
            if not buckets or size > free_bytes:
                buckets.append([])
                free_bytes = max_bytes
            buckets[-1].append(name)
            free_bytes -= size
        return buckets

    def tensors(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The tensors of `tensor_specs` for these weights, concatenated."""
        return [tensor for batch in self._batches(names) for tensor in self._build_tensors(batch)]

    def _batches(self, names: Collection[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        free_bytes = GATHER_BYTES
        for name in names:
            size = 4 * torch.Size(self.weights.shapes[name]).numel()
            if batch and size > free_bytes:
                yield batch
                batch, free_bytes = [], GATHER_BYTES
            batch.append(name)
            free_bytes -= size
        if batch:
            yield batch

    def _build_tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        read = self.weights.read(names)
        for name in names:
            # Popped, so that each full tensor is freed once its copy is made.
            tensor = read.pop(name)
            if name in self.quantized:
                yield from tiles(name, tensor)
            else:
                yield tensor.to(self.tensor_specs(name)[0].dtype)
