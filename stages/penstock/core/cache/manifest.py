"""Artifact manifests: the commit marker of an artifact, and the digest of the files that it lists.

Raises ArtifactError for a manifest that is damaged or of an unknown format. The manifest of a
folder is always read here before its files are used.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.cache.record import DIGEST, Record, digest_json, parse_record, read_record
from penstock.core.errors import ArtifactError

log = logging.getLogger("penstock.artifacts")

MANIFEST = "manifest.json"

UNDIGESTED = frozenset(
    {
        *("format", "stage", "key", "version", "settings", "inputs", "files", "facts"),
        *("seconds", "created", "code", "host"),
    }
)
"""Fields of manifests that predate digests."""

RELEASE = "release"
"""Stage name in the manifests of releases, whose keys are computed differently."""


def read_manifest(folder: Path) -> Record | None:
    """Return the manifest in `folder`, or None if there is none."""
    path = folder / MANIFEST
    try:
        record = read_record(path, UNDIGESTED, remedy_for(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _require_key(record, str(path), remedy_for(folder))


def parse_manifest(content: bytes, location: str, remedy: str) -> Record:
    """Parse and check the manifest `content` read from `location`."""
    return _require_key(parse_record(content, location, UNDIGESTED, remedy), location, remedy)


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


def _require_key(manifest: Record, location: str, remedy: str) -> Record:
    """Return the manifest if its recorded identity still hashes to its key. The manifest's own
    digest covers the other fields."""
    if DIGEST not in manifest and not _matches_own_key(manifest):
        raise ArtifactError(
            f"{location} is damaged: its settings and inputs do not match its key.\n  {remedy}"
        )
    return manifest


def _matches_own_key(manifest: Record) -> bool:
    named = ("stage", "version", "settings", "inputs", "key")
    if manifest.get("stage") == RELEASE or any(name not in manifest for name in named):
        return True
    try:
        inputs = {
            name: entry if isinstance(entry, str) else entry["key"]
            for name, entry in manifest["inputs"].items()
        }
    except (AttributeError, KeyError, TypeError):
        return False
    fields = {name: manifest[name] for name in ("stage", "version", "settings")}
    return manifest["key"] == digest_json({**fields, "inputs": inputs})
