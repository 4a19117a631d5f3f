"""SHA-256 file digests, cached in SQLite so that an unchanged file is read once.

A cache row is keyed by (device, inode) and is valid for one size, modification time and change time
(ctime), which only the kernel sets. Values derived from content alone are cached under the content
digest. A damaged row or database counts as a cache miss.

`docs/guide/integrity.md` states which bytes are proved when, and when a digest is remembered.
"""

import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from stat import S_ISDIR
from typing import Any, NamedTuple

from penstock.core import env
from penstock.core.files import named_os_errors
from penstock.core.machine.linux import file_system_type

log = logging.getLogger("penstock.artifacts")

# Granularity of a file system's clock, in nanoseconds: a kernel tick is at most 10 ms.
MIN_AGE_NS = 100_000_000

# The same where times are whole seconds (HFS+, ext3, some network file systems).
COARSE_MIN_AGE_NS = 2_000_000_000

# File systems without a change time of their own, or with one that a client or the program that
# made the image makes up. Nor is that of file systems in user space (fuse) reliable: object stores
# give the modification time.
WITHOUT_CTIME = frozenset(
    {
        *("msdos", "vfat", "exfat", "ntfs", "ntfs3", "cifs", "smb3", "smbfs", "9p", "vboxsf"),
        *("squashfs", "erofs", "iso9660", "udf", "cramfs", "romfs"),
    }
)

# File systems whose change times are of another machine's clock.
BY_SERVER = frozenset({"nfs", "nfs4", "lustre", "ceph", "gpfs", "beegfs", "afs", "wekafs", "gfs2"})

MAX_READERS = 8
"""Maximum number of files read concurrently; never more than the number of processors."""

CHECKSUM_DIGITS = 16  # Number of hex digits of the digest that each cache row stores of itself

COLUMNS = (
    "device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, sha256 TEXT, read_at INTEGER,"
    " guard TEXT"
)
"""The columns of the table of file digests, in SQL."""


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the file. Always reads the file."""
    with named_os_errors(path), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path], *, reread: bool = False) -> list[str]:
    """Return the SHA-256 of each file. Reads files that changed since their last read; with
    `reread`, all files."""
    paths = list(paths)
    if not paths:
        return []
    try:
        with closing(_open_database()) as database:
            return _digest_with_cache(database, paths, reread=reread)
    # OperationalError is a DatabaseError, so this clause must come first: the database is intact.
    except sqlite3.OperationalError:  # The database is locked, or the disk is full.
        return _read_all(paths)
    except sqlite3.DatabaseError:
        with suppress(OSError):
            _database_file().unlink(missing_ok=True)  # The database is damaged: recreate it.
        return _read_all(paths)


def is_remembered(path: Path) -> bool:
    """Whether the file system has change times by which the digest of a file can be cached."""
    return _Stat.of(path).granularity_ns is not None


class WrittenDigest(NamedTuple):
    """The SHA-256 of a file that was just written, and its modification time."""

    sha256: str
    mtime_ns: int


def digest_written(part: Path) -> WrittenDigest:
    """Digest a file that the caller has just written, so that `cache_written` can cache the digest.

    The modification time is set back: a later write within the same tick of the clock sets another.
    """
    stat = part.stat()
    mtime_ns = stat.st_mtime_ns - 1000
    os.utime(part, ns=(stat.st_atime_ns, mtime_ns))
    return WrittenDigest(sha256_file(part), mtime_ns)


def cache_written(path: Path, written: WrittenDigest) -> None:
    """Cache the digest of a file that was renamed to `path` after it was digested."""
    stat = _Stat.of(path)
    is_as_written = stat.is_own and stat.mtime_ns == written.mtime_ns
    # Where times are whole seconds, a second write within one leaves the same time as
    # `digest_written` set.
    if is_as_written and stat.granularity_ns == MIN_AGE_NS:
        with suppress(sqlite3.Error), closing(_open_database()) as database:
            _store_rows(database, [_Row.of(stat, written.sha256)])


@contextmanager
def keep_cached_across_links(paths: Iterable[Path]) -> Generator[None]:
    """Keep cached digests valid across a block that creates hard links to the files. Creating a
    link changes a file's ctime but not its content. Another user's files are read again."""
    paths = list(paths)
    before = [_Stat.of(path) for path in paths]
    yield
    with suppress(sqlite3.Error), closing(_open_database()) as database:
        rows: list[_Row] = []
        for path, stat in zip(paths, before, strict=True):
            now, digest = _Stat.of(path), _cached_digest(database, stat)
            is_unchanged = (now.size, now.mtime_ns) == (stat.size, stat.mtime_ns)
            if digest and now.is_own and is_unchanged:
                rows.append(_Row.of(now, digest))
        _store_rows(database, rows)


def cached_value(content: str, compute: Callable[[], Any]) -> Any:
    """Return the JSON value of `compute`, cached under `content`. `content` is a digest of
    everything that the value depends on: the inputs and the algorithm."""
    try:
        with closing(_open_database()) as database:
            row = database.execute(
                "SELECT value FROM derived WHERE content=?", (content,)
            ).fetchone()
    except sqlite3.Error:
        row = None
    if row and isinstance(row[0], str):
        text = row[0][CHECKSUM_DIGITS:]
        # Otherwise the row is damaged, or predates row digests.
        if row[0] == _with_checksum(content, text):
            return json.loads(text)
    value = compute()
    with_checksum = _with_checksum(content, json.dumps(value))
    try:
        # A connection's own `with` commits but does not close; `closing` alone would discard the
        # write.
        with closing(_open_database()) as database, database:
            database.execute("REPLACE INTO derived VALUES (?, ?)", (content, with_checksum))
    except sqlite3.Error:
        pass  # Computed again on the next call.
    return value


def _with_checksum(content: str, text: str) -> str:
    return hashlib.sha256(f"{content} {text}".encode()).hexdigest()[:CHECKSUM_DIGITS] + text


class _Stat(NamedTuple):
    """The stat fields that identify a file's content without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    uid: int

    @classmethod
    def of(cls, path: Path) -> "_Stat":
        # Opening a file has a network file system ask its server for the current times.
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            stat = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        # SQLite integers are signed; some file systems use larger inode numbers.
        device, inode = stat.st_dev & _SIGNED, stat.st_ino & _SIGNED
        return cls(device, inode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_uid)

    @property
    def is_own(self) -> bool:
        return self.uid in (os.getuid(), 0)

    @property
    def granularity_ns(self) -> int | None:
        """Granularity of the ctime; None if the file system has no reliable one."""
        kind = file_system_type(self.device)
        if not self.ctime_ns or kind in WITHOUT_CTIME or kind.startswith("fuse"):
            return None
        # With nanoseconds this is so once in a billion files, and costs one more read of the file.
        is_coarse = self.ctime_ns % 1_000_000_000 == 0
        if is_coarse and kind == "overlay":  # of an image below, which may have made its times up
            return None
        return COARSE_MIN_AGE_NS if is_coarse else MIN_AGE_NS

    @property
    def unsettled_ns(self) -> int:
        """Nanoseconds from this stat on in which a write could leave the ctime as it is, by a clock
        that may not be this machine's."""
        is_of_server = file_system_type(self.device) in BY_SERVER
        return (self.granularity_ns or 0) if is_of_server else 0

    def is_settled(self, now_ns: int) -> bool:
        """Whether every write from `now_ns` on changes the ctime."""
        granularity_ns = self.granularity_ns
        if granularity_ns is None:
            return False
        return bool(self.unsettled_ns) or now_ns - self.ctime_ns > granularity_ns


_SIGNED = (1 << 63) - 1


class _Row(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int
    sha256: str
    ctime_ns: int

    @classmethod
    def of(cls, stat: _Stat, sha256: str) -> "_Row":
        return cls(stat.device, stat.inode, stat.size, stat.mtime_ns, sha256, stat.ctime_ns)

    @property
    def with_checksum(self) -> tuple[Any, ...]:
        guard = hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:CHECKSUM_DIGITS]
        return (*self, guard)


def _digest_with_cache(
    database: sqlite3.Connection, paths: list[Path], *, reread: bool
) -> list[str]:
    stats = [_Stat.of(path) for path in paths]
    digests = [None if reread else _cached_digest(database, stat) for stat in stats]
    missing = [number for number, digest in enumerate(digests) if digest is None]
    # A server's clock cannot be compared with this machine's: wait for one tick of it instead.
    time.sleep(max((stats[number].unsettled_ns for number in missing), default=0) / 1e9)
    # Take the time before reading: a write during the read may leave the same file times.
    now = time.time_ns()
    rows: list[_Row] = []
    read = _read_all([paths[number] for number in missing])
    for number, digest in zip(missing, read, strict=True):
        digests[number], stat = digest, stats[number]
        # The second stat shows a write during the read, which may have hashed a mix of old and new.
        if stat.is_settled(now) and _Stat.of(paths[number]) == stat:
            rows.append(_Row.of(stat, digest))
    _store_rows(database, rows)
    return [digest for digest in digests if digest is not None]


def _store_rows(database: sqlite3.Connection, rows: Sequence[_Row]) -> None:
    if rows:
        with database:
            database.executemany(
                "REPLACE INTO known VALUES (?, ?, ?, ?, ?, ?, ?)",
                [row.with_checksum for row in rows],
            )


def _cached_digest(database: sqlite3.Connection, stat: _Stat) -> str | None:
    values = database.execute(
        "SELECT * FROM known WHERE device=? AND inode=?", (stat.device, stat.inode)
    ).fetchone()
    if not values:
        return None
    row = _Row(*values[:-1])
    is_valid = row == _Row.of(stat, row.sha256) and row.with_checksum == tuple(values)
    # Device numbers are reused: another file system, without a reliable ctime, may be there now.
    return row.sha256 if is_valid and stat.granularity_ns is not None else None


def _read_all(paths: Sequence[Path]) -> list[str]:
    # hashlib releases the GIL while it hashes.
    readers = min(MAX_READERS, os.cpu_count() or 1, len(paths))
    if readers < 2:
        return [sha256_file(path) for path in paths]
    with ThreadPoolExecutor(readers) as pool:
        return list(pool.map(sha256_file, paths))


def _database_file() -> Path:
    # A folder of each user's own: a cache home may be shared.
    return env.cache_home() / f"digests-{os.getuid()}" / "digests.sqlite"


def _open_database() -> sqlite3.Connection:
    """Raises sqlite3.OperationalError if another user could have written the database."""
    file = _database_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # lstat: a link could lead to a folder that is this user's but not the one that is checked.
        folder = file.parent.lstat()
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    if not S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid() or folder.st_mode & 0o022:
        _warn_shared(file.parent)
        raise sqlite3.OperationalError("other users can write it")
    try:
        return _connect(file)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:  # The database is missing or damaged: create a new one.
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        return _connect(file)


@cache
def _warn_shared(folder: Path) -> None:
    log.warning(
        "%s can be written to by other users, so no digest is remembered there, and every use reads"
        " the files: set its mode to 0700, or name another folder in PENSTOCK_CACHE_HOME",
        folder,
    )


def _connect(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=10)
    try:
        table = database.execute("PRAGMA table_info(known)").fetchall()
        if table and ", ".join(f"{name} {kind}" for _, name, kind, *_ in table) != COLUMNS:
            # Another version created it: no row could be stored in it.
            database.execute("DROP TABLE known")
        database.execute(
            f"CREATE TABLE IF NOT EXISTS known ({COLUMNS}, PRIMARY KEY (device, inode))"
        )
        database.execute(
            "CREATE TABLE IF NOT EXISTS derived (content TEXT PRIMARY KEY, value TEXT)"
        )
    except BaseException:
        database.close()
        raise
    return database
