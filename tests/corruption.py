"""Damage to files as disks, copies and people do it, and taking it back."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, rng: random.Random) -> None:
    """Invert one bit, in place, and leave the modification time as it was."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(path: Path, rng: random.Random) -> None:
    """Cut off the end."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path: Path, _rng: random.Random) -> None:
    """Leave no byte."""
    os.truncate(path, 0)


def zero(path: Path, rng: random.Random) -> None:
    """Overwrite the end with zeros, as a file system may after a power cut."""
    content = path.read_bytes()
    start = rng.randrange(len(content))
    path.write_bytes(content[:start] + bytes(len(content) - start))


def delete(path: Path, _rng: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def replace_by(other: Path) -> Damage:
    """Put another file's bytes in its place, by a rename as copying tools do."""

    def replace(path: Path, _rng: random.Random) -> None:
        part = path.with_name(f"{path.name}.incoming")
        shutil.copyfile(other, part)
        part.replace(path)

    return replace


IN_PLACE: dict[str, Damage] = {"flip": flip, "truncate": truncate, "empty": empty, "zero": zero}
"""Damage that needs a byte to work on."""


def damages_of(path: Path, others: list[Path]) -> dict[str, Damage]:
    """What can be done to the file, by name; `others` are files of the same kind."""
    content = path.read_bytes()
    found: dict[str, Damage] = dict(IN_PLACE) if content else {}
    if content.endswith(b"\0"):
        del found["zero"]  # it might change nothing
    found["delete"] = delete
    for other in others:
        if other.read_bytes() != content:
            found["replace"] = replace_by(other)
            break
    return found


@contextmanager
def damaged(path: Path, damage: Damage, rng: random.Random) -> Iterator[None]:
    """The file is damaged while the block runs; then it is as it was, its times included."""
    content, stat = path.read_bytes(), path.stat()
    damage(path, rng)
    try:
        yield
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
