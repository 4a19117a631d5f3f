"""The manifest that seals a result: reading it, and the digest of what it lists.

Raises ArtifactError for a manifest that is damaged or of an unknown format; nothing in a folder is
used before its manifest has been read here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.cache.record import DIGEST, Record, digest_json, parse_record, read_record
from penstock.core.errors import ArtifactError

MANIFEST = "manifest.json"

UNDIGESTED = frozenset(
    {
        *("format", "stage", "key", "version", "settings", "inputs", "files", "facts"),
        *("seconds", "created", "code", "host"),
    }
)
"""Fields of manifests that were written before they had a digest."""

RELEASE = "release"
"""What manifests of releases say in place of a stage; their keys are made otherwise."""


def read_manifest(folder: Path) -> Record | None:
    """The manifest in `folder`, or None where there is none."""
    path = folder / MANIFEST
    try:
        record = read_record(path, UNDIGESTED, remedy_for(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _checked(record, str(path), remedy_for(folder))


def parse_manifest(content: bytes, where: str, remedy: str) -> Record:
    """The manifest in `content`, which lies at `where`."""
    return _checked(parse_record(content, where, UNDIGESTED, remedy), where, remedy)


def remedy_for(folder: Path) -> str:
    """What to do about a damaged manifest in `folder`."""
    return f"Restore it from a copy, or delete {folder} to build it again."


def content_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the paths and digests of all files the manifest lists: equal for equal bytes."""
    return digest_json(sorted([file["path"], file["sha256"]] for file in manifest["files"]))


def _checked(manifest: Record, where: str, remedy: str) -> Record:
    """The manifest, if what its key was made from still gives that key; a digest says more."""
    if DIGEST not in manifest and not _gives_its_key(manifest):
        raise ArtifactError(
            f"{where} is damaged: its settings and inputs do not give its key.\n  {remedy}"
        )
    return manifest


def _gives_its_key(manifest: Record) -> bool:
    named = ("stage", "version", "settings", "inputs", "key")
    if manifest.get("stage") == RELEASE or any(name not in manifest for name in named):
        return True
    try:
        inputs = {
            name: each if isinstance(each, str) else each["key"]
            for name, each in manifest["inputs"].items()
        }
    except (AttributeError, KeyError, TypeError):
        return False
    fields = {name: manifest[name] for name in ("stage", "version", "settings")}
    return manifest["key"] == digest_json({**fields, "inputs": inputs})
