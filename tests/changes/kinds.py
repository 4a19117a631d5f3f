"""What may happen to a file or folder between two runs, and whether its content is another then.

Every change takes the file and a source of chance, and is taken back by whoever made it.
"""

import ctypes
import mmap
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.cache.digest_cache import digest_files

Change = Callable[[Path, random.Random], None]


def other_bytes(path: Path, rng: random.Random) -> bytes:
    """As many bytes as the file has, of which one is another."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def beside(path: Path, content: bytes) -> Path:
    """Another file with that content, as old as the file to the nanosecond."""
    other = path.with_name(f"{path.name}.other")
    other.write_bytes(content)
    set_back(other, path.stat())
    return other


def set_back(path: Path, stat: os.stat_result) -> None:
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip_in_place(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content))
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([content[at] ^ 1 << rng.randrange(8)]))


def other_content(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    mixed = bytes(rng.sample(content, len(content)))
    path.write_bytes(mixed if mixed != content else other_bytes(path, rng))


def copy_over(path: Path, rng: random.Random) -> None:
    """As `cp -p`."""
    other = beside(path, other_bytes(path, rng))
    shutil.copy2(other, path)
    other.unlink()


def set_time_back(path: Path, rng: random.Random) -> None:
    stat = path.stat()
    flip_in_place(path, rng)
    set_back(path, stat)


def rename_over(path: Path, rng: random.Random) -> None:
    """As `rsync -t` and `tar`."""
    beside(path, other_bytes(path, rng)).replace(path)


def hard_link_over(path: Path, rng: random.Random) -> None:
    other = beside(path, other_bytes(path, rng))
    path.unlink()
    os.link(other, path)
    other.unlink()


def through_another_link(path: Path, rng: random.Random) -> None:
    stat, other = path.stat(), path.with_name(f"{path.name}.link")
    os.link(path, other)
    flip_in_place(other, rng)
    set_back(other, stat)
    other.unlink()


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def cut_and_filled(path: Path, _rng: random.Random) -> None:
    """Time and size are as they were."""
    stat = path.stat()
    content = path.read_bytes()
    last = max(at for at, byte in enumerate(content) if byte)
    os.truncate(path, last)
    os.truncate(path, stat.st_size)
    set_back(path, stat)


def link_to_other(path: Path, rng: random.Random) -> None:
    other = beside(path, other_bytes(path, rng)).rename(hidden(path, "other"))
    path.unlink()
    path.symlink_to(other)


def link_turned(path: Path, rng: random.Random) -> None:
    """The file was known behind a link, which then leads elsewhere."""
    link_to_same(path, rng)
    digest_files([path])
    other = hidden(path, "turned")
    other.write_bytes(other_bytes(path, rng))
    set_back(other, path.stat())
    path.unlink()
    path.symlink_to(other)


def map_and_write(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[rng.randrange(len(mapped))] ^= 1
        mapped.flush()


def at_once_after_proof(path: Path, rng: random.Random) -> None:
    """As soon as its digest was taken, within the granularity of a clock."""
    stat, content = path.stat(), other_bytes(path, rng)
    path.write_bytes(path.read_bytes())
    set_back(path, stat)
    digest_files([path])
    path.write_bytes(content)
    set_back(path, stat)


def remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


def empty(path: Path, _rng: random.Random) -> None:
    os.truncate(path, 0)


def forbid(path: Path, _rng: random.Random) -> None:
    """Whoever asks has no more rights than others, as of `without_override`."""
    path.chmod(0)


CHANGES: dict[str, Change] = {
    each.__name__: each
    for each in (
        *(flip_in_place, other_content, copy_over, set_time_back, rename_over, hard_link_over),
        *(through_another_link, cut, cut_and_filled, link_to_other, link_turned, map_and_write),
        *(at_once_after_proof, remove, empty, forbid),
    )
}
"""After each, the file has other content or none."""


def touch(path: Path, _rng: random.Random) -> None:
    path.touch()


def age(path: Path, _rng: random.Random) -> None:
    """As `touch -d`."""
    os.utime(path, ns=(1, 1_000_000_007))


def copy_back(path: Path, _rng: random.Random) -> None:
    beside(path, path.read_bytes()).replace(path)


def write_again(path: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes())


def link_to_same(path: Path, _rng: random.Random) -> None:
    other = hidden(path, "same")
    shutil.copy2(path, other)
    path.unlink()
    path.symlink_to(other)


def change_mode(path: Path, _rng: random.Random) -> None:
    path.chmod(0o755)


def link_elsewhere(path: Path, _rng: random.Random) -> None:
    os.link(path, hidden(path, "link"))


def append_and_cut(path: Path, _rng: random.Random) -> None:
    size = path.stat().st_size
    with path.open("ab") as stream:
        stream.write(b"\n{}")
    os.truncate(path, size)


NEUTRAL: dict[str, Change] = {
    each.__name__: each
    for each in (
        *(touch, age, copy_back, write_again, link_to_same, change_mode, link_elsewhere),
        append_and_cut,
    )
}
"""After each, the file has the content that it had."""


def hidden(path: Path, name: str) -> Path:
    """The name of a file in a folder that no run reads."""
    folder = Path(os.environ["PENSTOCK_CACHE_HOME"]) / "aside"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}-{uuid.uuid4().hex}-{path.name}"


@contextmanager
def undone(path: Path) -> Iterator[None]:
    """After the block, the file or folder is as it was, and nothing else is in its folder."""
    names, kept = set(path.parent.iterdir()), hidden(path, "kept")
    is_folder = path.is_dir()
    copy(path, kept)
    try:
        yield
    finally:
        for new in {*path.parent.iterdir()} - names | {path}:
            delete(new)
        copy(kept, path)
        assert path.is_dir() is is_folder


def copy(source: Path, target: Path) -> None:
    """With times and modes."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def without_override() -> Iterator[None]:
    """This thread, and those that it starts, may read no file whose mode forbids it, though they
    are root's (capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    less = (ctypes.c_uint32 * 6)(*held)
    less[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective ones
    libc.capset(header, less)
    try:
        yield
    finally:
        libc.capset(header, held)
