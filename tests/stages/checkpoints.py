"""Small trained artifacts, written through torch's distributed checkpoint in one process."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Artifact
from penstock.core.files import write_json
from tests.manifests import write_manifest

STEP = 3
FOLDER = f"checkpoints/global_step_{STEP}"


def trained_artifact(path: Path, parameters: Mapping[str, torch.Tensor], **state: Any) -> Artifact:
    """A sealed train artifact whose last checkpoint holds `parameters` by name.

    It holds optimizer state too, in files that are then deleted: whoever reads it fails.
    """
    folder = path / FOLDER
    tensors = {name: tensor.detach() for name, tensor in parameters.items()}
    content = {
        "model": tensors,
        "optimizer": {f"state.{name}.exp_avg": t.float() for name, t in tensors.items()},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(content, storage_writer=writer, no_dist=True)
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        if index.fqn.startswith("optimizer."):
            (folder / info.relative_path).unlink()
    write_json(folder / "state.json", {"step": STEP, "adapter_only": False, **state})
    (folder / "COMPLETE").touch()
    write_manifest(path, stage="train", facts={"checkpoint": FOLDER})
    return Artifact("train", digest_json(sorted(tensors)), path)
