"""DCP's metadata file, written without an object for each box.

The file is a pickle of `Metadata`, as DCP's own writer makes it. Its `storage_data` has an entry
for each box that a rank has written: millions, each of which costs microseconds to make and to
pickle. Their opcodes have the same length, so they are written as an array with a column for each
number, and refer to names and offsets that the pickle contains once.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - what the file contains
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from penstock.engine.checkpoint.global_plan import GlobalPlan
from penstock.engine.checkpoint.tensor_classes import Ints

PROTOCOL = 4
"""Python's default before 3.14, which reads it as well."""
_REFERENCES = (
    *(MetadataIndex, "fqn", "index", "offset"),
    *(_StorageInfo, "relative_path", "length"),
)
"""What each entry refers to."""
# The type and the attributes that follow it, which `_END` sets.
_BEGIN = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
_END = pickle.SETITEMS + pickle.BUILD
# Followed by the bytes of an integer.
_LONG = pickle.LONG1 + b"\x08"


class RankFile(NamedTuple):
    """The file of a rank."""

    name: str
    lengths: Ints
    """The bytes of each box in it, in the rank's order and without gaps."""


def pickled_metadata(
    plan: GlobalPlan, files: Sequence[RankFile], storage_meta: StorageMeta
) -> Iterator[bytes]:
    """The content of `.metadata`, in pieces. `files` has the file of each rank."""
    metadata = Metadata(
        {**plan.tensors}, storage_data={}, storage_meta=storage_meta, version=CURRENT_DCP_VERSION
    )
    paths = [file.name for file in files]
    head = io.BytesIO()
    pickler = pickle.Pickler(head, protocol=PROTOCOL)
    # First what each entry refers to: it takes two bytes to refer to one of the first 256 objects.
    pickler.dump((_REFERENCES, metadata, plan.offsets, paths))
    memo = pickler.memo.copy()

    def number(pickled: object) -> int:
        return memo[id(pickled)][0]

    # The pickle goes on where it stopped: the tuple is dropped, and its objects stay in the memo.
    yield head.getvalue().removesuffix(pickle.STOP) + pickle.POP
    yield _push(number(metadata.storage_data))
    entry = _entry({reference: _push(number(reference)) for reference in _REFERENCES})
    names = np.array([number(name) for name in plan.tensors])
    offsets = np.array([number(size) for size in plan.offsets])
    for rank_plan, file, path in zip(plan.ranks, files, paths, strict=True):
        is_written_K = rank_plan.is_written
        assert len(file.lengths) == is_written_K.sum(), f"{path} has other boxes than planned"
        entries = np.repeat(entry, len(file.lengths))
        entries["name"] = names[rank_plan.tensors[is_written_K]]
        entries["chunk"] = rank_plan.chunks[is_written_K]
        entries["offsets"] = offsets[rank_plan.offsets[is_written_K]]
        entries["path"] = number(path)
        entries["start"] = np.cumsum(file.lengths) - file.lengths
        entries["length"] = file.lengths
        yield pickle.MARK + entries.tobytes() + pickle.SETITEMS
    yield pickle.POP + _push(number(metadata)) + pickle.STOP


def _push(number: int) -> bytes:
    """The opcode that pushes an object of the memo."""
    if number < 256:
        return pickle.BINGET + number.to_bytes(1, "little")
    return pickle.LONG_BINGET + number.to_bytes(4, "little")


def _entry(push: Mapping[object, bytes]) -> np.ndarray:
    """An entry from a `MetadataIndex` to a `_StorageInfo`: opcodes, and a field for each number."""
    path = _END + push[_StorageInfo] + _BEGIN + push["relative_path"] + pickle.LONG_BINGET
    fields = [
        (push[MetadataIndex] + _BEGIN + push["fqn"] + pickle.LONG_BINGET, "name", "<u4"),
        (push["index"] + pickle.BININT, "chunk", "<i4"),
        (push["offset"] + pickle.LONG_BINGET, "offsets", "<u4"),
        (path, "path", "<u4"),
        (push["offset"] + _LONG, "start", "<i8"),
        (push["length"] + _LONG, "length", "<i8"),
    ]
    columns: list[tuple[str, str]] = []
    for opcodes, name, dtype in fields:
        columns += [(f"before {name}", f"V{len(opcodes)}"), (name, dtype)]
    entry = np.zeros(1, np.dtype([*columns, ("end", f"V{len(_END)}")]))
    for opcodes, name, _ in fields:
        entry[f"before {name}"] = np.void(opcodes)
    entry["end"] = np.void(_END)
    return entry
