"""Files of an incomplete artifact that a later attempt takes over.

A finished file gets a note with its SHA-256. Only a file that matches its note is taken over; any
other is written again. A note is a hidden temporary file beside the file: sealing compares it with
the file and removes it.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from penstock.core.cache.digest_cache import cache_written, digest_files, digest_written
from penstock.core.cache.record import read_record, write_record
from penstock.core.errors import ArtifactError
from penstock.core.files import PART, atomic_write, remove

SUFFIX = f".finished{PART}"


@contextmanager
def finished_write(target: Path) -> Generator[Path]:
    """Write `target` as `core.files.atomic_write` does, then its note."""
    # The old note goes first: a crash after the rename leaves a file without a note, which is
    # written again.
    remove(_note(target))
    with atomic_write(target) as part:
        yield part
        written = digest_written(part)
    # After the rename, which changes the ctime that the cached digest is valid for.
    cache_written(target, written)
    write_record(_note(target), {"sha256": written.sha256})


def take_over(target: Path) -> bool:
    """Whether an earlier attempt finished the file and it is unchanged since; removes it if not."""
    if not target.exists():
        return False
    try:
        is_intact = digest_files([target]) == [_noted_digest(target)]
    except (OSError, ArtifactError):
        is_intact = False
    if not is_intact:
        remove(target)
    return is_intact


def require_unchanged(digests: Iterable[tuple[Path, str]]) -> None:
    """Raise ArtifactError if a file's digest, as it is now, differs from its note, or the note is
    damaged."""
    for path, digest in digests:
        if _note(path).exists() and _noted_digest(path) != digest:
            raise ArtifactError(
                f"{path} was changed after it was written.\n"
                "  Run again: the file is written again. If this repeats, check the disk."
            )


def _noted_digest(target: Path) -> str:
    """Raises ArtifactError for a damaged note, FileNotFoundError if there is none."""
    remedy = f"Run again: {target.name} is written again. If this repeats, check the disk."
    return read_record(_note(target), remedy).get("sha256", "")


def _note(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")
