"""safetensors headers, read and checked against the file size without torch.

The format: eight bytes with the header length, a JSON header with the dtype, shape and offsets of
each tensor, then the values in little endian and row-major order. No tensor values are read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import CapabilityError
from penstock.core.files import require_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_HEADER = 100_000_000  # Maximum header size in bytes, as in the safetensors library

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes per element of each supported dtype."""

# First bytes of a Git LFS pointer file, whose content was not downloaded.
LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # The dtype's name in the format
    start: int  # Offset of its first byte in the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def files_by_tensor(folder: Path, single: str = SINGLE) -> dict[str, Path]:
    """The file of each tensor of a folder: the single file `single`, or else those of the index.

    transformers takes the single file, too, where both are there. Raises CapabilityError if there
    is neither, or if it cannot be read.
    """
    index = folder / INDEX
    if index.is_file() and not (folder / single).is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            # Keep only the file name: an index must not point outside its folder.
            return {name: folder / Path(file).name for name, file in weight_map.items()}
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise unreadable(index, "it has no weight_map of tensors and files") from error
    if not (folder / single).is_file():
        raise CapabilityError(
            f"{folder} holds no {single} and no index of shards.\n"
            "  Weights in other formats (.bin, .gguf) are not read: save them as safetensors, "
            "or name another model.model_path."
        )
    return dict.fromkeys(read_header(folder / single), folder / single)


def read_header(file: Path) -> Mapping[str, Entry]:
    """Read and check the header. Raises CapabilityError if it does not match the file."""
    try:
        require_regular(file)
        with file.open("rb") as stream:
            first = stream.read(8)
            # An empty file begins every text.
            if LFS.startswith(first) and first:
                raise unreadable(file, "it is a pointer of Git LFS (git lfs pull fetches the file)")
            length = int.from_bytes(first, "little")
            size = file.stat().st_size
            # The shortest header is `{}`.
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise unreadable(file, f"its header would be {length} bytes of {size}")
            header: object = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CapabilityError(
            f"{file} is not there, and {INDEX} places tensors in it.\n"
            "  Fetch it again, or name another model.model_path."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(file, str(error)) from error
    if not isinstance(header, dict):
        raise unreadable(file, "its header is not a table")
    entries = cast("dict[str, Any]", header)
    begin = 8 + length
    tensors = {
        name: _entry(file, name, entry, begin, size)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    end = begin
    # By size too: an empty tensor begins where the next one does, and must come before it.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        # As in the safetensors library: tensors follow each other without gaps or overlaps.
        if tensor.start != end:
            raise unreadable(
                file,
                f"{name} begins at byte {tensor.start}, and the tensors before it end at {end}",
            )
        end += tensor.num_bytes
    if end != size:
        raise unreadable(file, f"its tensors end at byte {end} of {size}")
    return tensors


def _entry(file: Path, name: str, entry: Any, begin: int, size: int) -> Entry:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(file, f"the entry of {name} is not of the format") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise unreadable(file, f"the entry of {name} holds what is no count")
    if dtype not in WIDTHS:
        raise CapabilityError(
            f"{name} in {file} is of dtype {dtype}, which is not read.\n"
            f"  Save the weights as one of {', '.join(WIDTHS)}."
        )
    if end - start != math.prod(shape) * WIDTHS[dtype] or begin + end > size:
        raise unreadable(file, f"{name} would be bytes {start} to {end} of {size - begin}")
    return Entry(shape, dtype, begin + start)


def unreadable(file: Path, reason: str) -> CapabilityError:
    """The error for a file that cannot be used, with the reason."""
    return CapabilityError(
        f"{file} is not a safetensors file that can be read: {reason}.\n"
        "  Fetch it again, or name another model.model_path."
    )
