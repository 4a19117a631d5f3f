"""Quantize on load: read a weights folder as the tensors of a quantized model.

A quantized matrix `q_proj.weight` is read as `q_proj.weight.codes`, `.scales` and possibly
`.global_scales`: bytes that are computed from its rows while reading, a few at a time, or that a
pre-quantized checkpoint already has. Under its own name it is dequantized. Callers need not know
which tensors are computed.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from penstock.core.errors import CapabilityError
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored, narrow
from penstock.engine.quantization.prequantized import PrequantizedFormat
from penstock.engine.quantization.select_layers import Formats
from penstock.models.initialize import initialize
from penstock.models.layers.quantized_linear import COMPONENTS
from penstock.models.weights import WeightMap
from penstock_kernels.quant import QuantizedTensor, dequantize, largest, quantize

# Bytes of a matrix's rows, in fp32, that are quantized at a time; it needs up to 14 times as much
# memory.
STRETCH = 1 << 20


class TensorReader(Protocol):
    """Reads boxes of tensors by name."""

    def stored(self, name: str) -> Stored:
        """Shape and dtype."""
        ...

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, as stored."""
        ...

    def order(self, name: str) -> tuple[str, int]:
        """A sort key: the best order to read tensors."""
        ...

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name exists."""
        ...


class RandomInitTensors:
    """Randomly initialized tensors of a model without weights, a `TensorReader`; only the last one
    is cached."""

    def __init__(self, names: WeightMap, seed: int) -> None:
        self._names, self._seed = names, seed
        self._shapes = names.hf_shapes()
        self._last: tuple[str, torch.Tensor] | None = None

    def stored(self, name: str) -> Stored:
        return Stored(self._shapes[name], torch.float32, 0)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return narrow(self.initialized(name), offsets, sizes)

    def order(self, name: str) -> tuple[str, int]:
        return name, 0

    def require(self, names: Iterable[str]) -> None:
        assert set(names) <= set(self._shapes)

    def initialized(self, name: str) -> torch.Tensor:
        """A full tensor, fp32."""
        if self._last is None or self._last[0] != name:
            drawn = initialize(name, self._shapes[name], self._seed, self._names.config)
            self._last = name, drawn
        return self._last[1]


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor name into (matrix name, component), e.g. (`q_proj.weight`, `scales`). The
    component is empty for unquantized tensors."""
    base, _, leaf = name.rpartition(".")
    return (base, leaf) if leaf in COMPONENTS else (name, "")


class QuantizeOnLoad:
    """`inner` with the matrices that `formats` name quantized.

    `published` is the format of matrices that are already quantized in `folder`, which has them
    under the same names. Rows are quantized on `device`.
    """

    def __init__(
        self,
        inner: TensorReader,
        formats: Formats,
        published: PrequantizedFormat | None,
        device: torch.device,
        folder: SafetensorsFolder | None = None,
    ) -> None:
        self._inner, self._formats, self._published = inner, formats, published
        self._folder = folder
        self._device = device
        self._largest: dict[str, torch.Tensor] = {}
        # Components of the last matrix, by the first row of a block, until they are read.
        self._cached: tuple[str, dict[int, dict[str, torch.Tensor]]] = "", {}

    def stored(self, name: str) -> Stored:
        """Shape and dtype: uint8 for components of quantized matrices, fp32 if dequantized."""
        base, leaf = split_name(name)
        if leaf:
            rows, columns = self._shape(base)
            return Stored((rows, self._formats[base].widths(columns)[leaf]), torch.uint8, 0)
        if self._is_quantized(base):
            return Stored(self._stack(base) or self._shape(base), torch.float32, 0)
        return self._inner.stored(name)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor. Raises CapabilityError for a matrix that cannot be quantized."""
        base, leaf = split_name(name)
        if not leaf and not self._is_quantized(base):
            return self._inner.box(name, offsets, sizes)
        if not leaf and (stack := self._stack(base)):
            return self._box_of_stack(base, stack[2], offsets, sizes)
        (first, column), (count, width) = offsets, sizes
        parts: list[torch.Tensor] = []
        for block in self._blocks(base, first, first + count):
            rows = self._tensor(base, leaf, block)
            low, high = max(first, block.start), min(first + count, block.stop)
            parts.append(rows[low - block.start : high - block.start, column : column + width])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stack(self, name: str) -> tuple[int, int, int] | None:
        """The shape [E, K, N] of the matrices of all experts, which are quantized as the rows of
        the matrix [E N, K]; None for another tensor."""
        shape = () if self._published_source(name) else self._inner.stored(name).shape
        return (shape[0], shape[1], shape[2]) if len(shape) == 3 else None

    def _box_of_stack(
        self, name: str, rows: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        (expert, column, top), (experts, width, count) = offsets, sizes
        parts: list[torch.Tensor] = []
        for number in range(expert, expert + experts):
            first = number * rows + top
            blocks = self._blocks(name, first, first + count)
            matrix_NK = torch.cat([self._tensor(name, "", block) for block in blocks])
            parts.append(matrix_NK[first - blocks[0].start :][:count])
        return torch.stack(parts)[:, :, column : column + width].mT.contiguous()

    def order(self, name: str) -> tuple[str, int]:
        base, _ = split_name(name)
        if source := self._published_source(base):
            published, folder = source
            return folder.order(published.reader.codes_tensor_name(base))
        return self._inner.order(base)

    def require(self, names: Iterable[str]) -> None:
        bases = [split_name(name)[0] for name in names]
        self._inner.require(base for base in bases if not self._published_source(base))

    def measure(self, names: Iterable[str], ranks: ProcessInfo) -> None:
        """Compute the amax of full matrices before quantization, split over ranks. Called on all
        ranks with the names that each will read."""
        local_names = {
            base
            for base, leaf in map(split_name, names)
            if leaf and self._formats[base].scales == "e4m3" and not self._published_source(base)
        }
        # Sorted: each process has its own order of a set of strings, and ranks share names out by
        # index.
        all_names = sorted(set[str]().union(*ranks.all_gather(local_names)))
        largest_here = {
            name: self._largest_of(name) for name in all_names[ranks.rank :: ranks.world_size]
        }
        for rank_largest in ranks.all_gather(largest_here):
            self._largest |= rank_largest

    def _published_source(self, name: str) -> tuple[PrequantizedFormat, SafetensorsFolder] | None:
        published, folder = self._published, self._folder
        if published and folder and published.reader.is_quantized(folder, name):
            return published, folder
        return None

    def _is_quantized(self, name: str) -> bool:
        if source := self._published_source(name):
            # `inner` dequantizes stacks.
            return not source[0].is_stacked
        return name in self._formats

    def _shape(self, name: str) -> tuple[int, ...]:
        if source := self._published_source(name):
            published, folder = source
            return published.reader.shape(folder, name)
        if stack := self._stack(name):
            experts, columns, rows = stack
            return experts * rows, columns
        return self._inner.stored(name).shape

    def _blocks(self, name: str, first: int, end: int) -> list[range]:
        """The blocks that rows `first` to `end` overlap. Every caller gets the same boundaries."""
        rows, columns = self._shape(name)
        source = self._published_source(name)
        tall = (source[0].format if source else self._formats[name]).tile_rows
        # Whole tiles, which share a scale.
        step = max(STRETCH // (4 * columns) // tall, 1) * tall
        # One block at least: a box without rows takes its width and dtype from it.
        return [
            range(start, min(start + step, rows))
            for start in range(first // step * step, max(end, 1), step)
        ]

    def _tensor(self, name: str, leaf: str, block: range) -> torch.Tensor:
        """Rows of one component of a matrix; without `leaf`, dequantized to fp32."""
        if self._cached[0] != name:
            self._cached = name, {}
        blocks = self._cached[1]
        if leaf and (cached := blocks.get(block.start, {}).pop(leaf, None)) is not None:
            return cached
        if source := self._published_source(name):
            published, folder = source
            quantized = published.reader.rows(folder, name, block.start, block.stop)
        else:
            quantized = self._quantize(name, self._rows(name, block))
        if not leaf:
            return dequantize(quantized, torch.float32).cpu()
        tensors = quantized.as_bytes()
        component = tensors.pop(leaf)
        # Codes are read first. They are large, so they are not cached.
        blocks[block.start] = tensors if leaf == COMPONENTS[0] else {}
        return component

    def _quantize(self, name: str, rows: torch.Tensor) -> QuantizedTensor:
        format = self._formats[name]
        # NVFP4's scale of the whole matrix follows from its largest value.
        most = self._largest_of(name) if format.scales == "e4m3" else None
        try:
            return quantize(rows, format, None if most is None else most.to(rows.device))
        except ValueError as error:
            raise CapabilityError(
                f"lora.enable_qlora: {name}: {error}.\n  Check the checkpoint's weights."
            ) from error

    def _largest_of(self, name: str) -> torch.Tensor:
        if name not in self._largest:
            every = self._blocks(name, 0, self._shape(name)[0])
            amaxes = [largest(self._rows(name, block), self._formats[name]) for block in every]
            present = torch.stack([amax for amax in amaxes if amax is not None])
            self._largest[name] = present.amax(0).cpu()
        return self._largest[name]

    def _rows(self, name: str, block: range) -> torch.Tensor:
        if (stack := self._stack(name)) is None:
            columns = self._shape(name)[1]
            block_NK = self._inner.box(name, (block.start, 0), (len(block), columns))
            return block_NK.to(self._device)
        _, columns, rows = stack
        parts: list[torch.Tensor] = []
        for expert in range(block.start // rows, -(-block.stop // rows)):
            first = max(block.start - expert * rows, 0)
            end = min(block.stop - expert * rows, rows)
            part = self._inner.box(name, (expert, 0, first), (1, columns, end - first))
            parts.append(part[0].mT)
        return torch.cat(parts).to(self._device)
