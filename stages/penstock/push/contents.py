"""Contents of a push: the files to upload, their names at the target, and obsolete files to delete.
Only files listed in the export's manifest are uploaded, after their digests have been verified."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.core.cache.stage import Artifact
from penstock.core.cache.verify import MAX_LISTED_FILES, damaged_files
from penstock.core.errors import ArtifactError

ADAPTER_FOLDER = "adapter"  # Folder of an adapter at the target if a full model is pushed with it

# Weight file names that loaders recognize. One left over from an earlier push would be loaded
# instead of, or in addition to, the new files.
_WEIGHT_FILE_NAME = re.compile(
    r"(model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model.*\.bin(\.index\.json)?|adapter_model\.(safetensors|bin)|adapter_config\.json)"
)


@dataclass(frozen=True)
class PushFile:
    """A file: its local path, its name at the target, and its expected content."""

    name: str
    path: Path
    num_bytes: int
    sha256: str

    @property
    def fact(self) -> dict[str, Any]:
        return {"path": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


def list_contents(exported: Artifact) -> list[PushFile]:
    """The files to upload, sorted by their name at the target.

    A model goes to the root of the target and its adapter to `adapter/`; an adapter alone goes to
    the root. Raises ArtifactError if the manifest names a file outside the export, or if a file is
    missing or differs from the manifest.
    """
    manifest = exported.manifest
    folders: dict[str, str] = manifest["facts"]["folders"]
    prefixes = target_folders(folders)
    if not prefixes:
        raise ArtifactError(
            f"The export in {exported.path} holds neither a model nor an adapter; it names "
            f"{sorted(folders) or 'no folder'}.\n  Build it again with --force export."
        )
    files: list[PushFile] = []
    for entry in manifest["files"]:
        listed = PurePosixPath(entry["path"])
        for folder, prefix in prefixes.items():
            if listed.is_relative_to(folder):
                name = (PurePosixPath(prefix) / listed.relative_to(folder)).as_posix()
                path = _resolve_inside(exported.path, listed)
                files.append(PushFile(name, path, entry["bytes"], entry["sha256"]))
    if not files:
        raise ArtifactError(
            f"The export in {exported.path} lists no file in {', '.join(sorted(prefixes))}.\n"
            "  Build it again with --force export."
        )
    if damaged := damaged_files(exported.path, manifest["files"], "changed"):
        raise ArtifactError(
            f"the export in {exported.path} has changed since it was exported; nothing was sent:"
            "\n  "
            + "\n  ".join(damaged[:MAX_LISTED_FILES])
            + "\n  Build the export again with --force export."
        )
    return sorted(files, key=lambda file: file.name)


def obsolete_files(present: Iterable[str], sent: Iterable[PushFile]) -> list[str]:
    """Weight files at the target that are not part of this push, sorted. Only folders that receive
    files are searched; no other file is ever deleted."""
    names = {file.name for file in sent}
    folders = {PurePosixPath(name).parent for name in names}
    return sorted(
        name
        for name in present
        if name not in names
        and PurePosixPath(name).parent in folders
        and _WEIGHT_FILE_NAME.fullmatch(PurePosixPath(name).name)
    )


def target_folders(folders: Mapping[str, str]) -> dict[str, str]:
    """Folder of an export with these `folders` -> folder at the target; empty for an export that
    has neither a model nor an adapter."""
    if "hf" in folders:
        prefixes = {folders["hf"]: ""}
        if "adapter" in folders:
            prefixes[folders["adapter"]] = ADAPTER_FOLDER
        return prefixes
    return {folders["adapter"]: ""} if "adapter" in folders else {}


def _resolve_inside(root: Path, listed: PurePosixPath) -> Path:
    path = root / listed
    # resolve: a link in the export could publish a file of anywhere.
    outside = listed.is_absolute() or ".." in listed.parts
    if outside or not path.resolve().is_relative_to(root.resolve()):
        raise ArtifactError(
            f"The manifest in {root} lists {listed}, which lies outside of it; nothing was sent.\n"
            "  Build the export again with --force export."
        )
    return path
