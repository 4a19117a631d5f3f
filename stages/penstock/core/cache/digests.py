"""SHA-256 file digests, cached in SQLite so that an unchanged file is read once.

A cache row is keyed by (device, inode) and is valid for one size and modification time, so a hard
link of a known file is a cache hit under any name. The row also stores the change time (ctime) of
the last read: verification trusts only ctime, because a modification time can be set. Values
derived from content alone are cached under the content digest. Losing the cache costs one read of
each file. A damaged row or database counts as a cache miss.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.core import env

SETTLED_NS = 100_000_000
"""A file younger than this, in nanoseconds, is digested but not cached: a second write could leave
the same size and, within the clock's granularity, the same modification time."""

READERS = 8
"""Maximum number of files read concurrently; never more than the number of processors."""

GUARD = 16
"""Number of hex digits of the digest that each cache row stores of itself."""

Trust = Literal["mtime", "ctime", "nothing"]
"""When a cached digest is valid. mtime: size and modification time are unchanged. ctime: the change
time is unchanged, too. nothing: never."""


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the file. Always reads the file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path], trust: Trust = "mtime") -> list[str]:
    """Return the SHA-256 of each file. Reads only files that changed since their last read."""
    paths = list(paths)
    if not paths:
        return []
    try:
        with closing(_open_memory()) as memory:
            return _through_memory(memory, paths, trust)
    except sqlite3.OperationalError:  # The database is locked, or the disk is full.
        return _read_all(paths)
    except sqlite3.DatabaseError:
        with suppress(OSError):
            _memory_file().unlink(missing_ok=True)  # The database is damaged: recreate it.
        return _read_all(paths)


def remember(known: Iterable[tuple[Path, str]]) -> None:
    """Cache digests of files that the caller has read and that are no longer written."""
    rows: list[_Row] = []
    for path, digest in known:
        stat = _Stat.of(path)
        rows.append(_Row.of(stat, digest, read_at=stat.ctime_ns))
    with suppress(sqlite3.Error), closing(_open_memory()) as memory:
        _keep(memory, rows)


@contextmanager
def links_made(paths: Iterable[Path]) -> Generator[None]:
    """Keep cached digests valid across a block that creates hard links to the files. Creating a
    link changes a file's ctime but not its content."""
    paths = list(paths)
    before = [_Stat.of(path) for path in paths]
    yield
    with suppress(sqlite3.Error), closing(_open_memory()) as memory:
        rows: list[_Row] = []
        for path, stat in zip(paths, before, strict=True):
            now, digest = _Stat.of(path), _remembered(memory, stat, "ctime")
            if digest and (now.size, now.mtime_ns) == (stat.size, stat.mtime_ns):
                rows.append(_Row.of(now, digest, read_at=now.ctime_ns))
        _keep(memory, rows)


def derived(content: str, compute: Callable[[], Any]) -> Any:
    """Return the JSON value of `compute`, cached under `content`.

    `content` is a digest of everything that the value depends on: the inputs and the algorithm.
    """
    try:
        with closing(_open_memory()) as memory:
            row = memory.execute("SELECT value FROM derived WHERE content=?", (content,)).fetchone()
    except sqlite3.Error:
        row = None
    if row and (text := _unguarded(content, row[0])) is not None:
        return json.loads(text)
    value = compute()
    guarded = _guarded(content, json.dumps(value))
    try:
        with closing(_open_memory()) as memory, memory:
            memory.execute("REPLACE INTO derived VALUES (?, ?)", (content, guarded))
    except sqlite3.Error:
        pass  # Computed again on the next call.
    return value


def _guarded(content: str, text: str) -> str:
    """Prefix the text with a digest of the text and its cache key."""
    return hashlib.sha256(f"{content} {text}".encode()).hexdigest()[:GUARD] + text


def _unguarded(content: str, row: object) -> str | None:
    """Return the text of a row, or None if the row is damaged or predates row digests."""
    text = row[GUARD:] if isinstance(row, str) else ""
    return text if row == _guarded(content, text) else None


class _Stat(NamedTuple):
    """The stat fields that identify a file's content without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Stat":
        stat = path.stat()
        # SQLite integers are signed; some file systems use larger inode numbers.
        device, inode = stat.st_dev & _SIGNED, stat.st_ino & _SIGNED
        return cls(device, inode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


_SIGNED = (1 << 63) - 1


class _Row(NamedTuple):
    """A cached file digest; `read_at` is the file's ctime at the last read."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    sha256: str
    read_at: int

    @classmethod
    def of(cls, stat: _Stat, sha256: str, read_at: int) -> "_Row":
        return cls(stat.device, stat.inode, stat.size, stat.mtime_ns, sha256, read_at)

    @property
    def guarded(self) -> tuple[Any, ...]:
        """The row with its own digest."""
        guard = hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:GUARD]
        return (*self, guard)

    def holds_for(self, stat: _Stat, trust: Trust) -> bool:
        """Whether the row is valid for the file's current content."""
        if trust == "nothing" or (self.size, self.mtime_ns) != (stat.size, stat.mtime_ns):
            return False
        return trust == "mtime" or self.read_at == stat.ctime_ns


def _through_memory(memory: sqlite3.Connection, paths: list[Path], trust: Trust) -> list[str]:
    stats = [_Stat.of(path) for path in paths]
    known = [_remembered(memory, stat, trust) for stat in stats]
    due = [number for number, digest in enumerate(known) if digest is None]
    # Take the time before reading: a write during the read may leave the same file times.
    now = time.time_ns()
    digests = _read_all([paths[number] for number in due])
    rows: list[_Row] = []
    for number, digest in zip(due, digests, strict=True):
        known[number], stat = digest, stats[number]
        if now - stat.mtime_ns > SETTLED_NS and _Stat.of(paths[number]) == stat:
            rows.append(_Row.of(stat, digest, read_at=stat.ctime_ns))
    _keep(memory, rows)
    return [digest for digest in known if digest is not None]


def _keep(memory: sqlite3.Connection, rows: Sequence[_Row]) -> None:
    if rows:
        with memory:
            memory.executemany(
                "REPLACE INTO known VALUES (?, ?, ?, ?, ?, ?, ?)", [row.guarded for row in rows]
            )


def _remembered(memory: sqlite3.Connection, stat: _Stat, trust: Trust) -> str | None:
    found = memory.execute(
        "SELECT * FROM known WHERE device=? AND inode=?", (stat.device, stat.inode)
    ).fetchone()
    if not found:
        return None
    row = _Row(*found[:-1])
    return row.sha256 if row.guarded == tuple(found) and row.holds_for(stat, trust) else None


def _read_all(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of files read in threads; hashing releases the GIL."""
    readers = min(READERS, os.cpu_count() or 1, len(paths))
    if readers < 2:
        return [sha256_file(path) for path in paths]
    with ThreadPoolExecutor(readers) as pool:
        return list(pool.map(sha256_file, paths))


def _memory_file() -> Path:
    return env.cache_home() / "digests.sqlite"


def _open_memory() -> sqlite3.Connection:
    folder = env.cache_home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    file = _memory_file()
    try:
        return _opened(file)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:  # The database is missing or damaged: create a new one.
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        return _opened(file)


def _opened(file: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(file, timeout=10)
    try:
        memory.execute(
            "CREATE TABLE IF NOT EXISTS known (device INTEGER, inode INTEGER, size INTEGER,"
            " mtime_ns INTEGER, sha256 TEXT, read_at INTEGER, guard TEXT,"
            " PRIMARY KEY (device, inode))"
        )
        memory.execute("CREATE TABLE IF NOT EXISTS derived (content TEXT PRIMARY KEY, value TEXT)")
    except BaseException:
        memory.close()
        raise
    return memory
