"""Artifact manifests: the commit marker of an artifact, and the digest of the files that it lists.

Raises ArtifactError for a manifest that is damaged or of an unknown format. The manifest of a
folder is always read here before its files are used.
"""

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, cast

from penstock.core.cache.record import Record, digest_json, parse_record, read_record
from penstock.core.errors import ArtifactError
from penstock.core.files import is_relative_name

log = logging.getLogger("penstock.artifacts")

MANIFEST = "manifest.json"

_FIELDS: Mapping[str, type] = {
    **{"stage": str, "key": str, "version": int, "created": str},
    **{"settings": dict, "inputs": dict, "facts": dict, "files": list},
}
_SHA256 = re.compile(r"[0-9a-f]{64}")

RELEASE = "release"  # Stage name in the manifests of releases, whose keys are computed differently


def read_manifest(folder: Path) -> Record | None:
    """Return the manifest in `folder`, or None if there is none."""
    path = folder / MANIFEST
    try:
        record = read_record(path, remedy_for(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _require_fields(record, str(path), remedy_for(folder))


def parse_manifest(content: bytes, location: str, remedy: str) -> Record:
    """Parse and check the manifest `content` read from `location`."""
    return _require_fields(parse_record(content, location, remedy), location, remedy)


def remedy_for(folder: Path) -> str:
    """The recommended action for a damaged manifest in `folder`."""
    return f"Restore it from a copy, or delete {folder} to build it again."


def listed_files(folder: Path, pattern: str) -> list[Path]:
    """The files in `folder` that match `pattern`, sorted by name.

    In a complete artifact only those that its manifest lists, because only these are verified;
    others are reported. `folder` is the artifact's, or up to two levels below it.
    """
    files = sorted(folder.glob(pattern))
    for artifact in (folder, *folder.parents[:2]):
        if manifest := read_manifest(artifact):
            listed = {artifact / file["path"] for file in manifest["files"]}
            if unlisted := [path for path in files if path not in listed]:
                log.warning("%s: not in the manifest, and not read", ", ".join(map(str, unlisted)))
            return [path for path in files if path in listed]
    return files


def content_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the paths and digests of all listed files: equal for equal bytes."""
    return digest_json(sorted([file["path"], file["sha256"]] for file in manifest["files"]))


def _require_fields(manifest: Record, location: str, remedy: str) -> Record:
    # The digest of a record shows that it was written so, not that this program wrote it.
    if fault := _field_fault(manifest) or _files_fault(manifest["files"]):
        raise ArtifactError(f"{location} is damaged: {fault}.\n  {remedy}")
    return manifest


def _field_fault(manifest: Record) -> str | None:
    for name, kind in _FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            return f"{name} is missing or no {kind.__name__}"
    for name, source in manifest["inputs"].items():
        if not isinstance(source, dict) or not isinstance(cast(Record, source).get("key"), str):
            return f"input {name} has no key"
    try:
        has_zone = datetime.fromisoformat(manifest["created"]).tzinfo is not None
    except ValueError:
        has_zone = False
    return None if has_zone else f"created is {manifest['created']!r}, which is no time with a zone"


def _files_fault(files: list[Any]) -> str | None:
    paths: set[str] = set()
    for file in files:
        fields = cast(Record, file) if isinstance(file, dict) else {}
        if fields.keys() != {"path", "bytes", "sha256"}:
            return f"files has an entry that is not a path, bytes and sha256: {file!r}"
        path, num_bytes, sha256 = fields["path"], fields["bytes"], fields["sha256"]
        # `a//b` and `./a` are second names of files, which the check for duplicates would not see.
        is_name = isinstance(path, str) and is_relative_name(path)
        if not is_name or str(PurePosixPath(path)) != path or path == MANIFEST:
            return (
                f"files names {path!r}, which is no file inside its folder, and may have been "
                "written to overwrite others"
            )
        # Not isinstance: JSON's `true` is a bool, which is an int.
        if type(num_bytes) is not int or num_bytes < 0:
            return f"{path} has {num_bytes!r} bytes"
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            return f"{path} has the SHA-256 {sha256!r}"
        if path in paths:
            return f"files lists {path} twice"
        paths.add(path)
    return None
