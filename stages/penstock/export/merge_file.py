"""Merge one safetensors file: copy tensors without an adapter, merge the others in blocks of rows.
The offset of every tensor is known in advance, so several tensors are written concurrently."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.adapters.weight_delta import WeightDelta
from penstock.core import env
from penstock.core.errors import CapabilityError, StageError
from penstock.core.machine.linux import allocate, copy_file_range
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.hf.safetensors_writer import file_layout, put
from penstock.engine.peft.merge_adapter import AdapterMerge

BLOCK_BYTES = 32 << 20  # Bytes in fp32 of the rows that one thread merges at a time

THREADS = 4  # Maximum number of threads: each has a block in memory, and the disk is the bottleneck

MERGED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _TensorCopy:
    name: str
    source: str
    old: Stored
    new: Stored


def write_file(
    weights: SafetensorsFolder, changes: AdapterMerge, names: list[str], source: Path, target: Path
) -> None:
    """Write the tensors `names` of the file `source` to `target`, with `changes` applied. Raises
    CapabilityError for a change that does not match its tensor, and OSError for disk errors."""
    header, tensors, size = _plan_layout(weights, changes, names, source)
    with source.open("rb") as old, target.open("w+b") as new:
        allocate(new.fileno(), size)
        new.write(header)
        new.flush()  # The tensors are written by offset, past this buffer.
        with ThreadPoolExecutor(max_workers=min(THREADS, env.num_processors())) as pool:
            targets = set(changes.targets())
            jobs = [
                pool.submit(_merge_tensor, tensor, weights, changes, new.fileno())
                if tensor.name in targets
                else pool.submit(_copy_tensor, tensor, old.fileno(), new.fileno())
                for tensor in tensors
            ]
            for job in jobs:
                job.result()
        os.fsync(new.fileno())


def _plan_layout(
    weights: SafetensorsFolder, changes: AdapterMerge, names: list[str], source: Path
) -> tuple[bytes, list[_TensorCopy], int]:
    """The header, the offset of each tensor, and the file size."""
    old = {name: weights.stored(changes.source(name)) for name in names}
    shapes = {name: changes.shape(name) for name in names}
    sources = {name: changes.source(name) for name in names}
    if all(shapes[name] == was.shape and sources[name] == name for name, was in old.items()):
        # No tensor changes its place, so the header is copied, with its metadata.
        with source.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            stream.seek(0)
            header = stream.read(8 + length)
        tensors = [_TensorCopy(name, name, was, was) for name, was in old.items()]
        return header, tensors, source.stat().st_size
    layout = file_layout({name: (shapes[name], was.dtype) for name, was in old.items()})
    tensors = [
        _TensorCopy(name, sources[name], was, layout.tensors[name]) for name, was in old.items()
    ]
    return layout.header, tensors, layout.size


def _copy_tensor(tensor_copy: _TensorCopy, old: int, new: int) -> None:
    bytes_left = math.prod(tensor_copy.old.shape) * tensor_copy.old.dtype.itemsize
    source, target = tensor_copy.old.start, tensor_copy.new.start
    while bytes_left:
        count = copy_file_range(old, new, bytes_left, source, target)
        if count is None:  # The kernel cannot copy between these file systems.
            block = os.pread(old, min(bytes_left, BLOCK_BYTES), source)
            count = os.pwrite(new, block, target)
        if not count:
            raise StageError(f"the file of {tensor_copy.name} is truncated within it.")
        bytes_left, source, target = bytes_left - count, source + count, target + count


def _merge_tensor(
    tensor_copy: _TensorCopy, weights: SafetensorsFolder, changes: AdapterMerge, new: int
) -> None:
    if tensor_copy.new.dtype not in MERGED_DTYPES:
        raise CapabilityError(
            f"{tensor_copy.name} is {tensor_copy.new.dtype}, and adapters are merged only into "
            "float weights."
        )
    replaced = changes.replacement(tensor_copy.name)
    rows, *trailing = tensor_copy.new.shape or (1,)
    columns = math.prod(trailing)
    merged_tensor = (
        changes.replacing(tensor_copy.name).to(tensor_copy.new.dtype).view(rows, *trailing)
        if replaced
        else None
    )
    change = changes.change_of(tensor_copy.name)
    block_rows = rows if change and change.needs_all_rows else max(1, BLOCK_BYTES // (4 * columns))
    for start in range(0, rows, block_rows):
        count = min(block_rows, rows - start)
        if merged_tensor is not None:
            block = merged_tensor[start : start + count]
        else:
            block = weights.box(
                tensor_copy.source, (start, *[0] * len(trailing)), (count, *trailing)
            )
        merged = _merge_block(block, change, start, tensor_copy, changes)
        offset = tensor_copy.new.start + start * columns * tensor_copy.new.dtype.itemsize
        put(new, merged, offset)


def _merge_block(
    block: torch.Tensor,
    change: WeightDelta | None,
    start: int,
    tensor_copy: _TensorCopy,
    changes: AdapterMerge,
) -> torch.Tensor:
    """Merge a block, given as rows of one matrix; the matrices of several experts are stacked."""
    if change is None:
        return block
    shape = tensor_copy.new.shape if len(tensor_copy.new.shape) > 1 else (*tensor_copy.new.shape, 1)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if change.product.shape != (rows, columns):
        raise CapabilityError(
            f"{changes.folder.folder} adapts {tensor_copy.name} as a matrix of "
            f"{' x '.join(map(str, change.product.shape))}, and the base model's is {rows} x "
            f"{columns}.\n  Name the base model that it was trained on."
        )
    first = start * (rows // shape[0])
    return change.apply_to(block.reshape(-1, columns), first).view(block.shape)
