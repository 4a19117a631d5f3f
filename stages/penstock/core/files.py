"""Atomic file writes: write a temporary file, fsync, rename."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from penstock.core.errors import DamagedFileError

PART = ".part"  # Suffix of a file that is still being written. Leftover files may be deleted.


@contextmanager
def atomic_write(target: Path) -> Generator[Path]:
    """Yield a temporary path; if the block succeeds, rename it to `target` atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + PART)
    yield part
    # Some file systems write the rename before the data: after a power failure, `target` would be
    # empty.
    fsync(part)
    part.replace(target)
    # The new name is content of the folder, which has to reach the disk too.
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    # For reading is enough: fsync(2) flushes the pages of the file, whoever wrote them.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe, socket or device: to open it may block, and it may never end."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.ENXIO, "It is a device, a pipe or a socket, not a file", str(path))


@contextmanager
def named_os_errors(path: Path) -> Generator[None]:
    """Name the file in an OSError of a read, which names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(target: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON with sorted keys."""
    with atomic_write(target) as part:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
        part.write_text(f"{text}\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read the JSON value in `path`. Raises DamagedFileError if it is not JSON, OSError for read
    errors."""
    require_regular(path)
    with named_os_errors(path):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if not content else f"it is not JSON ({error})"
        raise DamagedFileError(
            f"{path} cannot be read: {reason}.\n"
            "  Restore it from a copy, or build again what it belongs to."
        ) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises as `read_json`, and for other JSON values."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DamagedFileError(
            f"{path} cannot be read: it is not a JSON object.\n"
            "  Restore it from a copy, or build again what it belongs to."
        )
    return cast("dict[str, Any]", value)


def link(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`, or copy it if links are not supported. Replaces another file
    at `target`."""
    if target.exists():
        # Where both are one path, unlinking `target` would delete its only name.
        if target.samefile(source):
            return
        target.unlink()
    try:
        os.link(source, target)
    except OSError:  # The file system has no hard links, or the link limit of the file is reached.
        with atomic_write(target) as part:
            shutil.copyfile(source, part)


def is_relative_name(name: str) -> bool:
    """Whether the name is of a file below its folder."""
    parts = PurePosixPath(name).parts
    # A backslash separates folders on Windows, and C libraries end a name at NUL.
    return bool(parts) and not (name.startswith("/") or ".." in parts or set("\\\0") & set(name))


def remove(path: Path) -> None:
    """Delete a file, a link or a folder tree, if it exists."""
    # Links first: is_dir follows them, and rmtree refuses a link to a folder.
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def backup_rename(folder: Path) -> Path:
    """Rename `folder` to the first free `<name>.old-<n>` beside it; return the new path."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def regular_files(folder: Path) -> list[Path]:
    """All files below `folder`, sorted by their path."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
