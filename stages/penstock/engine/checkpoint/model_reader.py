"""Read the model tensors of a checkpoint, never its optimizer state, in one process."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.dcp_io import read_boxes, whole_box
from penstock.engine.checkpoint.folders import read_state
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.checkpoint.train_state import MODEL


class CheckpointReader:
    """The parameters in a complete checkpoint folder, by checkpoint name, on the CPU. Raises
    ArtifactError for an incomplete folder or damaged metadata."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = read_state(folder)
        self._files = CheckpointFiles(folder)

    @cached_property
    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        metadata = self._files.read_metadata()
        return {
            name.removeprefix(MODEL): (tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(metadata.state_dict_metadata.items())
            if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter, sorted by name; reads no tensor."""
        return self._shapes

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read exactly these full parameters, in the dtype they were saved in. Raises ArtifactError
        if the checkpoint lacks one of them."""
        requested = list(names)
        if missing := [name for name in requested if name not in self._shapes]:
            raise ArtifactError(
                f"The checkpoint {self.folder} lacks {len(missing)} of {len(requested)} "
                f"parameters, first {missing[0]}.\n"
                "  It belongs to another model.model_path or model.config_path."
            )
        tensors: dict[str, torch.Tensor] = {}
        for name in requested:
            shape, dtype = self._shapes[name]
            tensors[name] = torch.empty(shape, dtype=dtype)
        if tensors:
            boxes = {MODEL + name: [whole_box(tensor)] for name, tensor in tensors.items()}
            read_boxes(boxes, self._files)
        return tensors
