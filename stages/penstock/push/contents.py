"""What of an export is sent, under which names, and which files at the target it supersedes.

Only files that the export's manifest lists are ever sent, and only after their bytes were found to
be those the manifest vouches for.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.core.cache.stage import Artifact
from penstock.core.cache.verify import NAMED, damaged_files
from penstock.core.errors import ArtifactError

ADAPTER_FOLDER = "adapter"
"""Where an adapter goes at the target when a whole model is sent with it."""

# Names by which loaders find weights. One of these left over from an earlier push would be loaded
# instead of, or on top of, what is sent now.
_LOADED_BY_NAME = re.compile(
    r"(model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model.*\.bin(\.index\.json)?|adapter_model\.(safetensors|bin)|adapter_config\.json)"
)


@dataclass(frozen=True)
class SentFile:
    """One file: where it lies here, what it is called there, and what it must contain."""

    name: str
    path: Path
    num_bytes: int
    sha256: str

    @property
    def fact(self) -> dict[str, Any]:
        """The file as plain JSON, without where it lies here."""
        return {"path": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


def list_contents(exported: Artifact) -> list[SentFile]:
    """The files to send, sorted by their name at the target.

    A model goes to the root of the target and its adapter below `adapter/`; an adapter that comes
    alone goes to the root. Raises ArtifactError when the manifest names a file outside the export,
    or when a file is missing or is not what the manifest says.
    """
    manifest = exported.manifest
    folders: dict[str, str] = manifest["facts"]["folders"]
    prefixes = _prefixes(folders, exported)
    found: list[SentFile] = []
    for entry in manifest["files"]:
        listed = PurePosixPath(entry["path"])
        for folder, prefix in prefixes.items():
            if listed.is_relative_to(folder):
                name = (PurePosixPath(prefix) / listed.relative_to(folder)).as_posix()
                path = _inside(exported.path, listed)
                found.append(SentFile(name, path, entry["bytes"], entry["sha256"]))
    if not found:
        raise ArtifactError(
            f"The export in {exported.path} lists no file in {', '.join(sorted(prefixes))}.\n"
            "  Build it again with --force export."
        )
    _check_content(exported.path, manifest["files"])
    return sorted(found, key=lambda file: file.name)


def superseded(present: Iterable[str], sent: Iterable[SentFile]) -> list[str]:
    """Files at the target that loaders would take for weights and that are not sent now, sorted.

    Only the folders that something is sent to are looked at; no other file is ever removed.
    """
    names = {file.name for file in sent}
    folders = {PurePosixPath(name).parent for name in names}
    return sorted(
        name
        for name in present
        if name not in names
        and PurePosixPath(name).parent in folders
        and _LOADED_BY_NAME.fullmatch(PurePosixPath(name).name)
    )


def _prefixes(folders: dict[str, str], exported: Artifact) -> dict[str, str]:
    """Folder of the export -> folder at the target."""
    if "hf" in folders:
        prefixes = {folders["hf"]: ""}
        if "adapter" in folders:
            prefixes[folders["adapter"]] = ADAPTER_FOLDER
        return prefixes
    if "adapter" in folders:
        return {folders["adapter"]: ""}
    raise ArtifactError(
        f"The export in {exported.path} holds neither a model nor an adapter; it names "
        f"{sorted(folders) or 'no folder'}.\n  Build it again with --force export."
    )


def _inside(root: Path, listed: PurePosixPath) -> Path:
    path = root / listed
    outside = listed.is_absolute() or ".." in listed.parts
    if outside or not path.resolve().is_relative_to(root.resolve()):
        raise ArtifactError(
            f"The manifest in {root} lists {listed}, which lies outside of it; nothing was sent.\n"
            "  Build the export again with --force export."
        )
    return path


def _check_content(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Raise ArtifactError unless all files have the bytes that were sealed."""
    if damaged := damaged_files(folder, files, "changed"):
        raise ArtifactError(
            f"the export in {folder} has changed since it was exported; nothing was sent:\n  "
            + "\n  ".join(damaged[:NAMED])
            + "\n  Build the export again with --force export."
        )
