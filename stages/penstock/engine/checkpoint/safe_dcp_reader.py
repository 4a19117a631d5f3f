"""Safe DCP reader: read checkpoint files from untrusted sources.

DCP metadata is a pickle, so it is read with an unpickler that allows only the few names such
metadata contains, and then validated; tensors are read with `weights_only`. Python versions pickle
paths and enumerations under different names; the reader accepts those of all of them, whichever
Python it runs on.
"""

import enum
import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.core.cache.folder_digests import DIGESTS, DamagedError
from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.folders import damaged_error, read_file

METADATA = ".metadata"

_ALLOWED = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class CheckpointFiles(FileSystemReader):
    """DCP's file reader, with metadata that cannot run code or point outside the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._contents: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata. Raises ArtifactError if it is invalid."""
        del args, kwargs
        if self._contents is None:
            try:
                self._contents = self._read()
            except DamagedError as error:
                raise damaged_error(self.folder, [str(error)]) from error
        # As `FileSystemReader.read_metadata`, which `dcp.load` expects.
        self._contents.storage_meta = self._contents.storage_meta or StorageMeta()
        self._contents.storage_meta.load_id = self.load_id
        return self._contents

    def file_faults(self) -> list[str]:
        """The files that are missing or shorter than the metadata says. Raises ArtifactError as
        `read_metadata`."""
        ends: dict[str, int] = defaultdict(int)
        for info in self.read_metadata().storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        problems: list[str] = []
        for name, end in ends.items():
            file = self.folder / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif (size := file.stat().st_size) < end:
                problems.append(f"{name} has {size} bytes, and tensors up to byte {end}")
        return problems

    def _read(self) -> Metadata:
        content = read_file(self.folder, METADATA)
        is_verified = (self.folder / DIGESTS).is_file()
        unpickler = _Unpickler if is_verified else _CarefulUnpickler
        try:
            metadata = unpickler(io.BytesIO(content)).load()
            _require_inside(metadata)
            if not is_verified:
                _require_sound(metadata)
        except ArtifactError:
            raise
        # A corrupt pickle may raise anything.
        except Exception as error:
            raise DamagedError(f"{METADATA} cannot be read: {error!r}") from error
        return metadata


def _require_inside(metadata: object) -> None:
    if not isinstance(metadata, Metadata):
        raise _invalid(f"it holds a {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        path = info.relative_path
        if not isinstance(path, str) or PurePosixPath(path).name != path or "\0" in path:
            raise _invalid(f"it names the file {path}")


def _require_sound(metadata: Metadata) -> None:
    stored = cast("dict[Any, Any]", metadata.storage_data)
    for info in stored.values():
        if not _are_counts([info.offset, info.length]) or info.transform_descriptors:
            raise _invalid(f"it does not say where in {info.relative_path} tensors lie")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise _invalid(f"it names a tensor {name!r}")
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise _invalid(f"of {name} it holds a {type(entry).__name__}")
        _require_tensor(name, entry, stored)


def _require_tensor(name: str, entry: TensorStorageMetadata, stored: dict[Any, Any]) -> None:
    properties, size = entry.properties, entry.size
    dtype = properties.dtype if isinstance(properties, TensorProperties) else None
    if not isinstance(dtype, torch.dtype):
        raise _invalid(f"it does not say the dtype of {name}")
    if not isinstance(size, torch.Size):
        raise _invalid(f"it does not say the shape of {name}")
    num_saved = 0
    for chunk in entry.chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not _is_within(chunk, size):
            raise _invalid(f"a part of {name} lies outside of it")
        info = stored.get(MetadataIndex(name, chunk.offsets))
        count = prod(chunk.sizes)
        if info is None or info.length < count * dtype.itemsize:
            raise _invalid(f"it does not say where all of {name} lies")
        num_saved += count
    if num_saved < prod(size):
        raise _invalid(f"it holds {num_saved} of {prod(size)} numbers of {name}")


def _is_within(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    offsets, sizes = chunk.offsets, chunk.sizes
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
        return False
    if not len(offsets) == len(sizes) == len(size) or not _are_counts([*offsets, *sizes]):
        return False
    ends = (offset + length for offset, length in zip(offsets, sizes, strict=True))
    return all(end <= bound for end, bound in zip(ends, size, strict=True))


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _invalid(reason: str) -> DamagedError:
    return DamagedError(f"{METADATA} is not that of a checkpoint: {reason}")


def _enum_member(enumeration: object, name: object) -> enum.Enum:
    # Python 3.11.0 to 3.11.3 pickle an enum member as `getattr(enumeration, name)`.
    if isinstance(enumeration, enum.EnumMeta) and name in enumeration.__members__:
        return cast("enum.Enum", enumeration.__members__[cast("str", name)])
    raise pickle.UnpicklingError(f"it reads {name!r} of {enumeration!r}")


class _AllowedNames:
    """Unpickler mixin that allows known names only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        # Python 3.13's module of the classes that are `pathlib`'s before and after it.
        module = "pathlib" if module == "pathlib._local" else module
        if name in _ALLOWED.get(module, ()):
            return getattr(sys.modules[module], name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Unpickler(_AllowedNames, pickle.Unpickler):
    """For bytes that a digest has verified."""


# In Python, as a flipped bit makes the C unpickler allocate memory for four billion objects.
class _CarefulUnpickler(_AllowedNames, pickle._Unpickler):  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUntypedBaseClass]
    """For unverified bytes."""
