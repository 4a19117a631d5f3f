"""Damage to saved files, for tests of what is said of it."""

from pathlib import Path

from penstock.core.cache.folder_digests import DIGESTS
from penstock.core.files import read_json, write_json


def flip_bit(file: Path, place: int | None = None) -> None:
    """Change one bit of one byte: of the middle one, unless a place is named."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    """Cut off its last bytes."""
    file.write_bytes(file.read_bytes()[:-7])


def overwrite_beginning(file: Path) -> None:
    """Change its first bytes, without which no tensor is found."""
    content = file.read_bytes()
    file.write_bytes(bytes(64) + content[64:])


def remove_digests(folder: Path) -> None:
    """Let a checkpoint be as those that were saved before checkpoints had digests."""
    (folder / DIGESTS).unlink()
    state = read_json(folder / "state.json")
    del state["digests"]
    write_json(folder / "state.json", state)
