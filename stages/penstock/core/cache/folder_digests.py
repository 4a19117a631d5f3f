"""XXH3-128 checksums of a folder's files, stored in `digests.json` of the same folder.

XXH3-128 detects corruption at memory bandwidth, which SHA-256 does not. It gives no protection
against tampering: anyone who can change a file can change its digest. Files are digested in chunks,
so several threads and several ranks can verify one file.
"""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from penstock.core.errors import ArtifactError
from penstock.core.files import is_relative_name, write_json

DIGESTS = "digests.json"
ALGORITHM = "xxh3_128"

PART_BYTES = 64 << 20
# Bytes per read: larger blocks do not fit the processor caches, smaller blocks cost more calls.
BLOCK_BYTES = 1 << 20
THREADS = 4  # Threads per process that read chunks concurrently


class DamagedError(ArtifactError):
    """Files of a folder differ from what was written. The message states only the error."""


@dataclass(frozen=True)
class FileDigest:
    """The length of a file in bytes and the hex digest of each chunk. Empty files have one
    chunk."""

    bytes: int
    parts: tuple[str, ...]


class Digester:
    """Incremental digest of bytes in write order."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = self._room = part_bytes
        self._bytes = 0
        self._parts: list[str] = []
        self._part = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        remaining = memoryview(data).cast("B")
        self._bytes += len(remaining)
        # Not `>=`: a file whose length is a multiple of the chunk would end with an empty chunk,
        # and `read` expects ceil(bytes / part_bytes) of them.
        while len(remaining) > self._room:
            self._part.update(remaining[: self._room])
            remaining = remaining[self._room :]
            self._parts.append(self._part.hexdigest())
            self._part, self._room = xxhash.xxh3_128(), self._part_bytes
        self._part.update(remaining)
        self._room -= len(remaining)

    def result(self) -> FileDigest:
        return FileDigest(self._bytes, (*self._parts, self._part.hexdigest()))


@dataclass(frozen=True)
class FolderDigests:
    """The digest of each file, by path relative to the folder."""

    files: Mapping[str, FileDigest]
    part_bytes: int = PART_BYTES

    def write(self, folder: Path) -> None:
        """Write `digests.json`, including its own digest."""
        files = {
            name: {"bytes": file.bytes, "digests": list(file.parts)}
            for name, file in self.files.items()
        }
        content = {"algorithm": ALGORITHM, "part_bytes": self.part_bytes, "files": files}
        write_json(folder / DIGESTS, {**content, "digest": _digest_record(content)})

    @classmethod
    def read(cls, folder: Path) -> "FolderDigests | None":
        """Read `digests.json`, or return None if there is none. Raises DamagedError."""
        if not (folder / DIGESTS).is_file():
            return None
        content = _read(folder, DIGESTS)
        try:
            record = json.loads(content)
            digest = record.pop("digest")
            files = {
                name: FileDigest(int(entry["bytes"]), tuple(entry["digests"]))
                for name, entry in record["files"].items()
            }
            digests = cls(files, int(record["part_bytes"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{DIGESTS} cannot be read ({error})") from error
        if digest != _digest_record(record):
            raise DamagedError(f"{DIGESTS} differs from its digest")
        if record["algorithm"] != ALGORITHM:
            raise DamagedError(f"{DIGESTS} uses {record['algorithm']}, not {ALGORITHM}")
        if digests.part_bytes < 1:
            raise DamagedError(f"{DIGESTS} says that parts have {digests.part_bytes} bytes")
        for name, file in files.items():
            if not is_relative_name(name):
                raise DamagedError(f"{DIGESTS} names {name}, outside of its folder")
            if len(file.parts) != max(1, -(-file.bytes // digests.part_bytes)):
                raise DamagedError(f"{DIGESTS} has {len(file.parts)} digests of {name}")
        return digests

    def content(self, folder: Path, name: str) -> bytes:
        """Read a small file and verify its digest. Raises DamagedError on a mismatch."""
        expected = self.files.get(name)
        if expected is None:
            raise DamagedError(f"{DIGESTS} does not list {name}")
        content = _read(folder, name)
        if len(content) != expected.bytes:
            raise DamagedError(_size_message(name, len(content), expected.bytes))
        digester = Digester(self.part_bytes)
        digester.update(content)
        if digester.result() != expected:
            raise DamagedError(f"{name} differs from its digest")
        return content

    def find_damage(
        self,
        folder: Path,
        *,
        share: int = 0,
        of: int = 1,
        progress: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Verify the files; return one error message per damaged file, empty if all match.

        Reader `share` (0 to of - 1) of `of` readers verifies every `of`-th chunk; `progress` is
        called after each chunk.
        """
        damage: dict[str, str] = {}
        all_parts = (
            (name, part)
            for name, file in sorted(self.files.items())
            for part in range(len(file.parts))
        )
        # Chunks in turn, not files: one large file is spread over all readers.
        parts = list(islice(all_parts, share, None, of))

        def check_part(part: tuple[str, int]) -> str | None:
            return self._check_part(folder, *part)

        with ThreadPoolExecutor(THREADS) as pool:
            for (name, _), fault in zip(parts, pool.map(check_part, parts), strict=True):
                if fault:
                    damage.setdefault(name, fault)
                progress()
        return list(damage.values())

    def _check_part(self, folder: Path, name: str, number: int) -> str | None:
        file = self.files[name]
        try:
            descriptor = os.open(folder / name, os.O_RDONLY)
            try:
                size = os.fstat(descriptor).st_size
                if size != file.bytes:
                    return _size_message(name, size, file.bytes)
                begin = number * self.part_bytes
                end = min(begin + self.part_bytes, file.bytes)
                if _digest_between(descriptor, begin, end) != file.parts[number]:
                    return f"{name} differs from its digest (in bytes {begin} to {end})"
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return _unreadable_message(name, error)
        return None


def digest_of_file(path: Path) -> FileDigest:
    """Digest the file's current bytes."""
    digester, block = Digester(), bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digester.update(memoryview(block)[:count])
    return digester.result()


def _digest_between(descriptor: int, begin: int, end: int) -> str:
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(min(BLOCK_BYTES, end - begin)))
    while begin < end:
        # preadv fills one block again and again; pread would allocate bytes for each read.
        count = os.preadv(descriptor, [block[: end - begin]], begin)
        # The file was truncated after fstat; the digest then differs.
        if count == 0:
            break
        digest.update(block[:count])
        begin += count
    return digest.hexdigest()


def _digest_record(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{name} is missing") from error
    except OSError as error:
        raise DamagedError(_unreadable_message(name, error)) from error


def _size_message(name: str, size: int, expected: int) -> str:
    return f"{name} has {size} bytes instead of {expected}"


def _unreadable_message(name: str, error: OSError) -> str:
    return f"{name} cannot be read ({error.strerror or error})"
