"""Requantize: add products to quantized matrices by dequantizing, adding and quantizing rows.

A scale may depend on rows and columns of other ranks. So the ranks first all-reduce the amax of
every matrix, and then each writes its own codes, bitwise identical to those of a single process.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from penstock.adapters.weight_delta import LoraDelta
from penstock.core.errors import StageError
from penstock.engine.distributed.param_shards import LocalParam, local, rows_here
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.models.layers.quantized_linear import COMPONENTS, QuantizedMatrix
from penstock.models.weights import WeightMap
from penstock_kernels.quant import QuantizedTensor, dequantize, largest, quantize

# Bytes of a matrix's rows, in fp32, that are computed at a time; it needs several times as much
# memory.
STRETCH = 4 << 20


@dataclass(frozen=True)
class _Rows:
    """Local rows of one checkpoint matrix, and the product added to them."""

    matrix: str
    # The first row's index in the matrix.
    first: int
    # The entries of the amax table for the local columns.
    columns: slice
    # Views of the local components.
    value: QuantizedTensor
    product: LoraDelta
    # The product's row for the first of these rows.
    start: int

    def blocks(self) -> Iterator["_Rows"]:
        rows, columns = self.value.shape
        step = max(1, STRETCH // (4 * columns))
        for low in range(0, rows, step):
            count = min(step, rows - low)
            value = self.value.narrow(-2, low, count)
            yield replace(self, first=self.first + low, value=value, start=self.start + low)

    def merged(self, device: torch.device) -> torch.Tensor:
        tensors = {name: tensor.to(device) for name, tensor in self.value.tensors.items()}
        value = QuantizedTensor(self.value.format, self.value.columns, **tensors)
        product = self.product
        on_device = replace(product, left=product.left.to(device), right=product.right.to(device))
        return on_device.add_to_reproducibly(dequantize(value, torch.float32), self.start)


@dataclass(frozen=True)
class _Table:
    """The amax values from which the scales of one matrix are computed, [entries, groups]."""

    most: torch.Tensor
    # Rows that share an entry.
    tall: int

    def raise_by(self, rows: _Rows, merged: torch.Tensor) -> None:
        amax = largest(merged, rows.value.format, rows.first)
        assert amax is not None
        entries = self._entries(rows)
        covered = range(int(entries[0]), int(entries[-1]) + 1)
        firsts = [max(entry * self.tall - rows.first, 0) for entry in covered]
        table_rows = self.most[covered.start : covered.stop, rows.columns]
        # In place: what is all-reduced has these numbers. Rows of an entry share a maximum.
        table_rows.copy_(torch.maximum(table_rows, amax.expand(len(merged), -1)[firsts]))

    def of(self, rows: _Rows) -> torch.Tensor:
        """The amax argument of `quantize` for a block of rows."""
        return self.most[self._entries(rows).to(self.most.device)][:, rows.columns]

    def _entries(self, rows: _Rows) -> torch.Tensor:
        return torch.arange(rows.first, rows.first + rows.value.shape[0]) // self.tall


class MergeIntoQuantized:
    """Adds products to the quantized matrices of a parallelized model."""

    def __init__(
        self,
        params: Sequence[LocalParam],
        names: WeightMap,
        ranks: ProcessInfo,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`params` are the parameters of this rank's parts; `group` has the ranks of its pipeline
        stage, and is None for a single one. Rows are computed on the device of `ranks`."""
        self._params = {id(param.parameter): param for param in params}
        self._names, self._shapes = names, names.hf_shapes()
        self._ranks, self._group = ranks, group
        self._broken: set[str] = set()

    def add(self, weight: QuantizedMatrix, products: Sequence[tuple[int, LoraDelta]]) -> None:
        """Add products to the local rows. Each comes with the first row of the weight that it
        applies to. Called on all ranks of the stage, with weights in the same order."""
        adapted = list(self._rows(weight, products))
        tables = self._tables(weight, adapted)
        for rows in adapted:
            if rows.matrix in self._broken:
                continue
            table = tables.get(rows.matrix)
            for block in rows.blocks():
                merged = block.merged(self._ranks.device)
                try:
                    quantized = quantize(merged, weight.format, table.of(block) if table else None)
                except ValueError:
                    self._broken.add(rows.matrix)
                    break
                block.value.copy_(quantized)

    def require_finite(self, steps: int) -> None:
        """Called on all ranks after all products are added. Raises StageError on all ranks, if a
        value on any rank is not finite."""
        broken = sorted(set[str]().union(*self._ranks.all_gather(self._broken)))
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise StageError(
                f"merging adapters after step {steps} makes numbers of {broken[0]}{more} that are "
                "not finite, which cannot be quantized.\n"
                "  Lower train.lr, or lora.merge_lora_interval; the last checkpoint is intact."
            )

    def _rows(
        self, weight: QuantizedMatrix, products: Sequence[tuple[int, LoraDelta]]
    ) -> Iterator[_Rows]:
        parameters = dict(weight.named_parameters())
        begin, end = rows_here(parameters["codes"], 2)
        if begin == end:
            return
        flat = {leaf: local(raw.detach()).flatten(0, -2) for leaf, raw in parameters.items()}
        value = QuantizedTensor.of_bytes(weight.format, weight.columns, flat)
        codes, scales = (self._params[id(parameters[leaf])].shards for leaf in COMPONENTS[:2])
        in_order = sorted(products, key=lambda pair: pair[0])
        starts = [start for start, _ in in_order]
        for piece, of_scales in zip(codes, scales, strict=True):
            row, first_group, num_groups = begin + piece.start, 0, 1
            if weight.format.tile_rows > 1:
                # Components are stored as bytes.
                first_group = of_scales.offsets[1] // weight.format.scales_dtype.itemsize
                num_groups = weight.format.num_groups(weight.columns)
            # One product, or those of the experts in a stack.
            number = max(bisect_right(starts, row) - 1, 0)
            for start, product in in_order[number:]:
                if start >= row + piece.num_rows:
                    break
                low = max(row, start)
                count = min(row + piece.num_rows, start + product.shape[0]) - low
                if count <= 0:
                    continue
                yield _Rows(
                    matrix=piece.tensor.removesuffix(f".{COMPONENTS[0]}"),
                    first=piece.offsets[0] + low - row,
                    columns=slice(first_group, first_group + num_groups),
                    value=value.narrow(-2, low - begin, count),
                    product=product,
                    start=low - start,
                )

    def _tables(self, weight: QuantizedMatrix, adapted: Sequence[_Rows]) -> Mapping[str, _Table]:
        """The amax tables of all checkpoint matrices in a weight, reduced over all ranks; none if
        scales depend on local rows only."""
        codes = self._params[id(weight.get_parameter(COMPONENTS[0]))]
        native = codes.name.removesuffix(f".{COMPONENTS[0]}")
        shapes = {matrix: self._shapes[matrix] for matrix in self._names.hf_names(native)}
        sizes: dict[str, tuple[int, int]] = {}
        for matrix, (*_, rows, columns) in shapes.items():
            if tall := _tall(weight, rows, columns):
                wide = weight.format.num_groups(columns) if weight.format.tile_rows > 1 else 1
                sizes[matrix] = -(-rows // tall), wide
        if not sizes:
            return {}
        flat = torch.zeros(sum(map(math.prod, sizes.values())), device=self._ranks.device)
        # Views of one tensor: one all-reduce for all matrices.
        parts = flat.split([math.prod(size) for size in sizes.values()])
        tables = {
            matrix: _Table(part.view(size), _tall(weight, *shapes[matrix]))
            for (matrix, size), part in zip(sizes.items(), parts, strict=True)
        }
        for rows in adapted:
            for block in rows.blocks():
                tables[rows.matrix].raise_by(block, block.merged(self._ranks.device))
        if self._group is not None:
            with self._ranks.heartbeat.waiting():
                dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._group)
        if not flat.isfinite().all():
            is_broken = {name: not table.most.isfinite().all() for name, table in tables.items()}
            self._broken |= {name for name, broken in is_broken.items() if broken}
        return tables


def _tall(weight: QuantizedMatrix, rows: int, columns: int) -> int:
    """How many rows of a matrix share an amax entry; 0 if no scale depends on other ranks."""
    if weight.format.scales == "e4m3":
        return rows
    if weight.format.group is None:
        # One scale for a row, of which other ranks have columns.
        return int(weight.columns < columns)
    return weight.format.tile_rows if weight.format.tile_rows > 1 else 0
