"""Reading a checkpoint's model tensors in one process, whatever layout wrote them.

The optimizer's state is never read. A checkpoint may come from elsewhere, so its metadata, which is
a pickle, is read with an unpickler that knows only the few names such metadata is made of.
"""

import pickle
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint import read_state

MODEL = "model."
"""What a checkpoint puts before a parameter's name."""

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


class CheckpointReader:
    """The parameters in a complete checkpoint folder, by native name, on the CPU.

    Raises ArtifactError for a folder whose save did not end, or whose metadata is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = read_state(folder)
        self._files = _Files(folder)

    @cached_property
    def _found(self) -> Mapping[str, TensorStorageMetadata]:
        metadata = self._files.read_metadata()
        return {
            name.removeprefix(MODEL): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter, in the order of the names; reads no tensor."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(self._found.items())
        }

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Exactly these parameters, whole, in the dtype they were saved in.

        Raises ArtifactError when the checkpoint lacks one of them.
        """
        wanted = list(names)
        if missing := [name for name in wanted if name not in self._found]:
            raise ArtifactError(
                f"The checkpoint {self.folder} lacks {len(missing)} of {len(wanted)} parameters, "
                f"first {missing[0]}.\n"
                "  It belongs to another model.model_path or model.config_path."
            )
        found = {
            MODEL + name: torch.empty(
                self._found[name].size, dtype=self._found[name].properties.dtype
            )
            for name in wanted
        }
        if not found:
            return {}
        with warnings.catch_warnings():
            # Reading alone is meant, and the library warns of it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(found, storage_reader=self._files, no_dist=True)
        return {name.removeprefix(MODEL): tensor for name, tensor in found.items()}


class _Files(FileSystemReader):
    """DCP's file reader, with metadata that can neither run code nor lead out of the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
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
            with (self._folder / ".metadata").open("rb") as stream:
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
            f"The metadata of the checkpoint {self._folder} cannot be read: {reason}.\n"
            "  Take another checkpoint of the run, or run the train stage again."
        )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")
