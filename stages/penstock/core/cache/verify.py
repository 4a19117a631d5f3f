"""Artifact verification: compare files with the digests in their manifest.

The first verification reads every file. Later ones read a file again only if its metadata changed
(see `core.cache.digest_cache`), so verifying an unchanged artifact costs one stat per file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from penstock.core.cache.digest_cache import digest_files
from penstock.core.errors import ArtifactError
from penstock.core.os_errors import describe_os_error

Verify = Literal["always", "changed", "off"]
"""always: read every file. changed: read files whose metadata changed since their last read. off:
compare only sizes."""

MAX_LISTED_FILES = 5  # Maximum number of damaged files listed in an error


def require_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless every listed file exists with its recorded size."""
    _require(folder, manifest, _wrong_sizes(folder, manifest["files"]))


def require_content(folder: Path, manifest: Mapping[str, Any], verify: Verify) -> None:
    """Raise ArtifactError unless every listed file has its recorded content."""
    if verify != "off":
        _require(folder, manifest, damaged_files(folder, manifest["files"], verify))


def damaged_files(
    folder: Path, files: Sequence[Mapping[str, Any]], verify: Literal["always", "changed"]
) -> list[str]:
    """Return one line per listed file that differs; empty if all match."""
    if wrong := _wrong_sizes(folder, files):
        return wrong
    paths = [folder / file["path"] for file in files]
    try:
        digests = digest_files(paths, reread=verify == "always")
    except OSError as error:
        return [f"{error.filename or folder}: cannot be read, {describe_os_error(error)}"]
    return [
        f"{path}: content differs from the manifest (SHA-256 {digest[:12]}… here, "
        f"{file['sha256'][:12]}… there)"
        for path, file, digest in zip(paths, files, digests, strict=True)
        if digest != file["sha256"]
    ]


def _wrong_sizes(folder: Path, files: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong: list[str] = []
    for file in files:
        path = folder / file["path"]
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            wrong.append(f"{path}: cannot be read, {describe_os_error(error)}")
            continue
        if size is None:
            wrong.append(f"{path}: missing")
        elif size != file["bytes"]:
            wrong.append(f"{path}: {size} bytes, {file['bytes']} in the manifest")
    return wrong


def _require(folder: Path, manifest: Mapping[str, Any], damaged: Sequence[str]) -> None:
    if not damaged:
        return
    stage = manifest["stage"]
    more = (
        f"\n  and {len(damaged) - MAX_LISTED_FILES} more files"
        if len(damaged) > MAX_LISTED_FILES
        else ""
    )
    raise ArtifactError(
        f"the {stage} result in {folder} is damaged:\n  "
        + "\n  ".join(damaged[:MAX_LISTED_FILES])
        + more
        + f"\n  Restore these files from a copy, or build the result again with --force {stage}."
    )
