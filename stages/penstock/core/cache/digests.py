"""SHA-256 of files, remembered so that an untouched file is read once.

A row of the memory is keyed by (device, inode) and holds for one size and modification time, so
that a hard link of a known file is known too, whatever it is called. It also says at which change
time (ctime) the bytes were last read: whoever verifies a file trusts only that, for a modification
time can be set. What follows from content alone is remembered by the content's digest.
It is a cache: losing it costs a read, and a damaged row or file counts as lost.
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
"""A file younger than this is digested but not remembered: a second write could leave the same
size and, within the clock's granularity, the same modification time."""

READERS = 8
"""Most files that are read at once; there are never more readers than processors."""

GUARD = 16
"""Hex digits of the digest that a row of the memory has of itself."""

Trust = Literal["mtime", "ctime", "nothing"]
"""When a remembered digest stands for a file's bytes. mtime: size and modification time are the
same. ctime: also no change of any kind since the bytes were read. nothing: never."""


def sha256_file(path: Path) -> str:
    """The digest of the file's bytes, always read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path], trust: Trust = "mtime") -> list[str]:
    """The digest of each file, reading only those that changed since they were last read."""
    paths = list(paths)
    if not paths:
        return []
    try:
        with closing(_open_memory()) as memory:
            return _through_memory(memory, paths, trust)
    except sqlite3.OperationalError:  # locked, or on a full disk
        return _read_all(paths)
    except sqlite3.DatabaseError:
        with suppress(OSError):
            _memory_file().unlink(missing_ok=True)  # damaged: the next one to come begins another
        return _read_all(paths)


def remember(known: Iterable[tuple[Path, str]]) -> None:
    """Take note of digests of files that the caller has read, and that nobody writes any more."""
    rows: list[_Row] = []
    for path, digest in known:
        stat = _Stat.of(path)
        rows.append(_Row.of(stat, digest, read_at=stat.ctime_ns))
    with suppress(sqlite3.Error), closing(_open_memory()) as memory:
        _keep(memory, rows)


@contextmanager
def links_made(paths: Iterable[Path]) -> Generator[None]:
    """Carry what is known of the files over the block, which makes links to them: that sets their
    change time, and changes no byte."""
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
    """The JSON value `compute` gives, remembered under `content`.

    `content` is a digest of all that the value follows from: what was read, and how.
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
        pass  # computed again next time
    return value


def _guarded(content: str, text: str) -> str:
    """The text after a digest of itself and of what it is remembered under."""
    return hashlib.sha256(f"{content} {text}".encode()).hexdigest()[:GUARD] + text


def _unguarded(content: str, row: object) -> str | None:
    """The text in a row; None for one that is damaged, or from before rows were guarded."""
    text = row[GUARD:] if isinstance(row, str) else ""
    return text if row == _guarded(content, text) else None


class _Stat(NamedTuple):
    """What tells a file's content apart without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Stat":
        stat = path.stat()
        # SQLite's integers are signed; some file systems number beyond them.
        device, inode = stat.st_dev & _SIGNED, stat.st_ino & _SIGNED
        return cls(device, inode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


_SIGNED = (1 << 63) - 1


class _Row(NamedTuple):
    """A file's digest as it is remembered; `read_at` is its ctime when it was read."""

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
        """The row with a digest of its own."""
        guard = hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:GUARD]
        return (*self, guard)

    def holds_for(self, stat: _Stat, trust: Trust) -> bool:
        """Whether it says what the file holds now."""
        if trust == "nothing" or (self.size, self.mtime_ns) != (stat.size, stat.mtime_ns):
            return False
        return trust == "mtime" or self.read_at == stat.ctime_ns


def _through_memory(memory: sqlite3.Connection, paths: list[Path], trust: Trust) -> list[str]:
    stats = [_Stat.of(path) for path in paths]
    known = [_remembered(memory, stat, trust) for stat in stats]
    due = [number for number, digest in enumerate(known) if digest is None]
    # From before they are read: what is written meanwhile may bear the times that it bore already.
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
    """Digests of files that are read side by side; hashing frees the interpreter's lock."""
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
    except sqlite3.DatabaseError:  # no database, or a damaged one: begin another
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
