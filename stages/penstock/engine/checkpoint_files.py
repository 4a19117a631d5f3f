"""Reading DCP's files without trusting them.

A checkpoint may come from elsewhere. Its metadata is a pickle, so it is read with an unpickler
that knows only the few names such metadata is made of; tensors are read with `weights_only`.
"""

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from penstock.core.errors import ArtifactError

_KNOWN = {
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
    """DCP's file reader, with metadata that can neither run code nor lead out of the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._contents: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of contents. Raises ArtifactError when it is not one."""
        del args, kwargs
        if self._contents is None:
            self._contents = self._unpickled()
        self._contents.storage_meta = self._contents.storage_meta or StorageMeta()
        self._contents.storage_meta.load_id = self.load_id
        return self._contents

    def _unpickled(self) -> Metadata:
        try:
            with (self.folder / ".metadata").open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise self._damaged(error) from error
        if not isinstance(metadata, Metadata):
            raise self._damaged(f"it holds a {type(metadata).__name__}")
        for info in metadata.storage_data.values():
            if PurePosixPath(info.relative_path).name != info.relative_path:
                raise self._damaged(f"it names the file {info.relative_path}")
        return metadata

    def _damaged(self, reason: object) -> ArtifactError:
        return ArtifactError(
            f"The metadata of the checkpoint {self.folder} cannot be read: {reason}.\n"
            "  Take another checkpoint of the run, or run the train stage again."
        )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")
