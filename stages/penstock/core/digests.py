"""SHA-256 of files, remembered so that an untouched file is read once.

The memory is keyed by (path, size, mtime_ns, inode). It is a cache: losing it costs a read.
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from penstock.core import env

SETTLED_NS = 100_000_000
"""A file younger than this is digested but not remembered: a second write could leave the same
size and, within the clock's granularity, the same modification time."""


def sha256_of(path: Path) -> str:
    """The digest of the file's bytes, always read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digests_of(paths: Iterable[Path]) -> list[str]:
    """The digest of each file, reading only those that changed since they were last read."""
    paths = list(paths)
    try:
        return _through_memory(paths)
    except sqlite3.Error:
        # The memory is unreadable, locked or on a full disk; the files are not.
        return [sha256_of(path) for path in paths]


def _through_memory(paths: list[Path]) -> list[str]:
    with closing(_open_memory()) as memory:
        found: list[str] = []
        for path in paths:
            stat = path.stat()
            name = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)
            row = memory.execute(
                "SELECT digest FROM digests WHERE path=? AND size=? AND mtime_ns=? AND inode=?",
                name,
            ).fetchone()
            if row:
                found.append(row[0])
                continue
            digest = sha256_of(path)
            found.append(digest)
            if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
                memory.execute("REPLACE INTO digests VALUES (?, ?, ?, ?, ?)", (*name, digest))
                memory.commit()
        return found


def _open_memory() -> sqlite3.Connection:
    folder = env.cache_home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    memory = sqlite3.connect(folder / "digests.sqlite", timeout=10)
    memory.execute(
        "CREATE TABLE IF NOT EXISTS digests"
        " (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, inode INTEGER, digest TEXT)"
    )
    return memory
