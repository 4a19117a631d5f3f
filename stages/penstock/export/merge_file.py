"""Merge one safetensors file: copy tensors without an adapter, merge the others in blocks of rows.

The offset of every tensor is known in advance, so several tensors are written concurrently.
"""

import errno
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.adapters.weight_delta import WeightDelta
from penstock.core import env
from penstock.core.errors import CapabilityError, StageError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.hf.safetensors_writer import file_layout, put
from penstock.engine.peft.merge_adapter import AdapterMerge

STRETCH = 32 << 20
"""Bytes in fp32 of the rows that one thread merges at a time."""

THREADS = 4
"""Maximum number of threads: each has a block in memory, and the disk is the bottleneck."""

NO_COPYING = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of systems without copy_file_range between these two files."""

MERGED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Placed:
    """A tensor of the output file."""

    name: str
    old: Stored
    new: Stored


def write_file(
    weights: SafetensorsFolder, changes: AdapterMerge, names: list[str], source: Path, target: Path
) -> None:
    """Write the tensors `names` of the file `source` to `target`, with `changes` applied.

    Raises CapabilityError for a change that does not match its tensor, and OSError for disk errors.
    """
    header, placed, size = _laid_out(weights, changes, names, source)
    with source.open("rb") as old, target.open("w+b") as new:
        os.posix_fallocate(new.fileno(), 0, size)
        os.pwrite(new.fileno(), header, 0)
        with ThreadPoolExecutor(max_workers=min(THREADS, env.num_processors())) as pool:
            jobs = _jobs(weights, changes, placed, old.fileno(), new.fileno())
            for done in [pool.submit(job) for job in jobs]:
                done.result()
        os.fsync(new.fileno())


def _laid_out(
    weights: SafetensorsFolder, changes: AdapterMerge, names: list[str], source: Path
) -> tuple[bytes, list[_Placed], int]:
    """The header, the offset of each tensor, and the file size."""
    old = {name: weights.stored(name) for name in names}
    shapes = {name: merged_shape(name, weights, changes) for name in names}
    if all(shapes[name] == was.shape for name, was in old.items()):
        with source.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            stream.seek(0)
            header = stream.read(8 + length)
        placed = [_Placed(name, was, was) for name, was in old.items()]
        return header, placed, source.stat().st_size
    layout = file_layout({name: (shapes[name], was.dtype) for name, was in old.items()})
    placed = [_Placed(name, was, layout.tensors[name]) for name, was in old.items()]
    return layout.header, placed, layout.size


def _jobs(
    weights: SafetensorsFolder, changes: AdapterMerge, placed: list[_Placed], old: int, new: int
) -> Iterator[Callable[[], None]]:
    targets = set(changes.targets())
    for one in placed:
        if one.name not in targets:
            yield lambda one=one: _copy(one, old, new)
        else:
            yield lambda one=one: _change(one, weights, changes, new)


def _copy(one: _Placed, old: int, new: int) -> None:
    left = math.prod(one.old.shape) * one.old.dtype.itemsize
    source, target = one.old.start, one.new.start
    while left:
        count = _copied(old, new, left, source, target)
        if not count:
            raise StageError(f"the file that holds {one.name} ends before it does.")
        left, source, target = left - count, source + count, target + count


def _copied(old: int, new: int, left: int, source: int, target: int) -> int:
    """Number of bytes copied by the kernel; if unsupported, copy one block in user space."""
    try:
        return os.copy_file_range(old, new, left, source, target)
    except OSError as error:
        if error.errno not in NO_COPYING:
            raise
    return os.pwrite(new, os.pread(old, min(left, STRETCH), source), target)


def _change(one: _Placed, weights: SafetensorsFolder, changes: AdapterMerge, new: int) -> None:
    """Read, merge and write a tensor, in blocks of as many rows as fit the memory limit."""
    if one.new.dtype not in MERGED_DTYPES:
        raise CapabilityError(f"{one.name} is of {one.new.dtype}, into which nothing is merged.")
    replaced = changes.replacement(one.name)
    rows, *rest = one.new.shape or (1,)
    columns = math.prod(rest)
    whole = changes.replacing(one.name).to(one.new.dtype).view(rows, *rest) if replaced else None
    change = changes.change_of(one.name)
    at_once = rows if change and change.needs_all_rows else max(1, STRETCH // (4 * columns))
    for start in range(0, rows, at_once):
        count = min(at_once, rows - start)
        if whole is not None:
            stretch = whole[start : start + count]
        else:
            stretch = weights.box(one.name, (start, *[0] * len(rest)), (count, *rest))
        made = _changed(stretch, change, start, one, changes)
        place = one.new.start + start * columns * one.new.dtype.itemsize
        put(new, made, place)


def _changed(
    stretch: torch.Tensor,
    change: WeightDelta | None,
    start: int,
    one: _Placed,
    changes: AdapterMerge,
) -> torch.Tensor:
    """Merge a block, given as rows of one matrix; the matrices of several experts are stacked."""
    if change is None:
        return stretch
    shape = one.new.shape if len(one.new.shape) > 1 else (*one.new.shape, 1)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if change.product.shape != (rows, columns):
        raise CapabilityError(
            f"{changes.folder.folder} adapts {one.name} as a matrix of "
            f"{' x '.join(map(str, change.product.shape))}, and the base model's is {rows} x "
            f"{columns}.\n  Name the base model that it was trained on."
        )
    first = start * (rows // shape[0])
    return change.made_of(stretch.reshape(-1, columns), first).view(stretch.shape)


def merged_shape(name: str, weights: SafetensorsFolder, changes: AdapterMerge) -> tuple[int, ...]:
    """The tensor's shape in the merged model."""
    return (changes.replacement(name) or weights.stored(name)).shape
