"""Read tar files of WebDataset: consecutive members with the same name up to its first dot are a
record.

Members are read in order and never written to a folder. `key.json` gives the columns of the record,
`key.name.json` the column `name`, `key.txt` the column `text` and other texts a column by their
suffix. Its images, audio and videos take the place of their names in the JSON; if it names none of
a kind they are a column (`images`, `audios`, `videos`), in the order of the archive. Other members
are not read.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import basename
from typing import Any, BinaryIO

from penstock.media.kinds import (
    AUDIO,
    AUDIO_SUFFIXES,
    IMAGE,
    KINDS,
    MAX_BYTES,
    VIDEO,
    VIDEO_SUFFIXES,
    MediaKind,
)
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import group_items
from penstock.prepare.readers.lines import parse_line, utf8_error
from penstock.prepare.readers.records import Chunk, Value
from penstock.prepare.readers.tar_members import iter_members

MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
"""(key, suffix) of a member's name."""

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
SOUNDS = ("wav", *(suffix.removeprefix(".") for suffix in AUDIO_SUFFIXES))
VIDEOS = tuple(suffix.removeprefix(".") for suffix in VIDEO_SUFFIXES)
FILES = {
    **dict.fromkeys(IMAGES, IMAGE),
    **dict.fromkeys(SOUNDS, AUDIO),
    **dict.fromkeys(VIDEOS, VIDEO),
}
"""Kinds of media, by suffix."""
# Columns and members that may name them: frames of a video are images.
NAMING = {column for kind in KINDS.values() for column in (*kind.sources, *kind.columns)}
TEXTS = {"txt": "text", "text": "text", "caption": "caption", "cls": "cls"}
"""Columns of text, by suffix."""
# Suffixes of media that are not read, without which a record would be another one.
UNREAD = ("m4a",)


@dataclass(frozen=True)
class Member:
    """A file of an archive."""

    name: str
    key: str
    """Its name up to the first dot."""
    suffix: str
    """In lower case, after the first dot of the name."""
    content: bytes
    size: int
    """Bytes in the archive; the content of a larger one than is allowed is empty."""
    position: int
    """In the archive, from 1."""
    is_link: bool
    """Whether it is a link or a device, which has no content."""

    @property
    def kind(self) -> str:
        """The last part of the suffix."""
        return self.suffix.rpartition(".")[2]

    @property
    def is_read(self) -> bool:
        """Whether records have it."""
        return self.kind in FILES or self.kind == "json" or self.suffix in TEXTS

    @property
    def max_size(self) -> int:
        """Bytes that are allowed."""
        return FILES[self.kind].max_bytes if self.kind in FILES else MAX_BYTES


def tar_records(file: SourceFile) -> Iterator[Chunk]:
    """The records of a tar file. Raises StageError if it is damaged."""
    with file.open() as stream:
        records = _iter_records(stream, file)
        yield from group_items(records, lambda records: [_parse(members) for members in records])


def _iter_records(stream: BinaryIO, file: SourceFile) -> Iterator[tuple[int, list[Member], int]]:
    """(number of a record from 1, its members, their bytes)."""
    number, key, held, size = 1, None, list[Member](), 0
    for position, info, content in iter_members(stream, file.name, _is_content_read):
        member = _member(info, content, position)
        if member is None:
            continue
        if held and member.key != key:
            yield number, held, size
            number, held, size = number + 1, [], 0
        key = member.key
        held.append(member)
        size += len(content)
        if size > file.max_record_bytes:
            raise file.too_large(f"record {number:,}, up to member {position:,}")
    if held:
        yield number, held, size


def _member(info: tarfile.TarInfo, content: bytes = b"", position: int = 0) -> Member | None:
    """The member of a record; None for folders and notes."""
    parts = MEMBER.fullmatch(info.name)
    if parts is None or basename(parts[1]).startswith("_") or info.isdir():
        return None
    key, suffix = parts[1], parts[2].lower()
    return Member(info.name, key, suffix, content, info.size, position, not info.isreg())


def _is_content_read(info: tarfile.TarInfo) -> bool:
    member = _member(info)
    # tarfile would go back to the target of a link, which a stream cannot.
    if member is None or member.is_link:
        return False
    return member.is_read and info.size <= member.max_size


def _parse(members: Sequence[Member]) -> Value:
    if why := _why_unusable(members):
        return BadRecord("bad_value", why)
    record: dict[str, Any] = {}
    media: dict[str, dict[str, bytes]] = {}
    for member in members:
        if member.kind in FILES:
            media.setdefault(FILES[member.kind].name, {})[member.name] = member.content
        elif member.kind == "json":
            value = parse_line(member.content)
            if isinstance(value, BadRecord):
                return BadRecord(value.reason, f"{member.name}: {value.why}")
            column = member.suffix.removesuffix("json").rstrip(".")
            record |= {column: value} if column else value
        elif member.suffix in TEXTS:
            try:
                record[TEXTS[member.suffix]] = member.content.decode()
            except UnicodeDecodeError as error:
                return BadRecord("bad_value", f"{member.name}: {utf8_error(error)}")
    for kind, files in media.items():
        record = _with_media(record, KINDS[kind], files)
    return record


def _why_unusable(members: Sequence[Member]) -> str | None:
    first: dict[str, Member] = {}
    for member in members:
        if member.kind in UNREAD:
            return f"it has {member.name}, which is not read"
        if not member.is_read:
            continue
        if member.is_link:
            return f"{member.name} is a link or a device; tar with --dereference --hard-dereference"
        if member.size > member.max_size:
            return f"{member.name} has {member.size:,} bytes; {member.max_size:,} are allowed"
        column = TEXTS.get(member.suffix, member.suffix)
        if (first_member := first.setdefault(column, member)) is not member:
            return (
                f"members {first_member.position:,} ({first_member.name}) and {member.position:,} "
                f"({member.name}) are both its {column}"
            )
    return None


def _with_media(record: dict[str, Any], kind: MediaKind, files: dict[str, bytes]) -> dict[str, Any]:
    # Members have their folder in their name, and the JSON may name them without.
    by_name = files | {basename(name): content for name, content in files.items()}
    placed = 0

    def replaced(value: Any, is_name: bool) -> Any:
        nonlocal placed
        if isinstance(value, dict):
            return {name: replaced(part, name in NAMING) for name, part in value.items()}
        if isinstance(value, list):
            return [replaced(part, is_name) for part in value]
        if is_name and isinstance(value, str) and value in by_name:
            placed += 1
            return by_name[value]
        return value

    with_media = replaced(record, False)
    if not placed:
        with_media = {name: value for name, value in with_media.items() if name not in kind.columns}
        with_media[kind.columns[0]] = list(files.values())
    return with_media
