"""SHA-256 of files, remembered so that an untouched file is read once.

The memory is keyed by (device, inode, size, mtime_ns), so that a hard link of a known file is known
too, whatever it is called. What follows from content alone is remembered by the content's digest.
It is a cache: losing it costs a read.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

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


def remember(known: Iterable[tuple[Path, str]]) -> None:
    """Take note of digests that were computed elsewhere, of files that nobody writes any more."""
    rows = [(*_name_of(path), digest) for path, digest in known]
    try:
        with closing(_open_memory()) as memory, memory:
            memory.executemany("REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)
    except sqlite3.Error:
        return


def derived(content: str, compute: Callable[[], Any]) -> Any:
    """The JSON value `compute` gives, remembered under `content`.

    `content` is a digest of all that the value follows from: what was read, and how.
    """
    try:
        with closing(_open_memory()) as memory:
            row = memory.execute("SELECT value FROM derived WHERE content=?", (content,)).fetchone()
    except sqlite3.Error:
        row = None
    if row:
        return json.loads(row[0])
    value = compute()
    try:
        with closing(_open_memory()) as memory, memory:
            memory.execute("REPLACE INTO derived VALUES (?, ?)", (content, json.dumps(value)))
    except sqlite3.Error:
        pass  # computed again next time
    return value


def _through_memory(paths: list[Path]) -> list[str]:
    with closing(_open_memory()) as memory:
        found: list[str] = []
        for path in paths:
            name = _name_of(path)
            row = memory.execute(
                "SELECT digest FROM files WHERE device=? AND inode=? AND size=? AND mtime_ns=?",
                name,
            ).fetchone()
            if row:
                found.append(row[0])
                continue
            digest = sha256_of(path)
            found.append(digest)
            if time.time_ns() - name[3] > SETTLED_NS:
                memory.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (*name, digest))
                memory.commit()
        return found


def _name_of(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    # SQLite's integers are signed; some file systems number beyond them.
    return (stat.st_dev & _SIGNED, stat.st_ino & _SIGNED, stat.st_size, stat.st_mtime_ns)


_SIGNED = (1 << 63) - 1


def _open_memory() -> sqlite3.Connection:
    folder = env.cache_home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    memory = sqlite3.connect(folder / "digests.sqlite", timeout=10)
    memory.execute(
        "CREATE TABLE IF NOT EXISTS files (device INTEGER, inode INTEGER, size INTEGER,"
        " mtime_ns INTEGER, digest TEXT, PRIMARY KEY (device, inode))"
    )
    memory.execute("CREATE TABLE IF NOT EXISTS derived (content TEXT PRIMARY KEY, value TEXT)")
    return memory
