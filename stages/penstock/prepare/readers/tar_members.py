"""Iterate over the members of a tar stream, up to its proven end.

`tarfile` takes a damaged or missing header for the end of the archive, and would lose the members
after it without an error.
"""

import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from penstock.core.errors import StageError

# Bytes of a header that extends another one, such as a long name: `tarfile` reads it at once.
MAX_EXTENSION = 1 << 20

EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
# What `tarfile` raises for damaged headers.
DAMAGED = (tarfile.TarError, EOFError, ValueError, OverflowError, IndexError)

BLOCK = 1 << 20


def iter_members(
    stream: BinaryIO, name: str, is_read: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[int, tarfile.TarInfo, bytes]]:
    """(number of a member from 1, its header, its content if `is_read`, else nothing).

    Raises StageError for a damaged header, a truncated member, or an archive whose end is not two
    blocks of zeros with nothing but zeros after them.
    """
    number = 1
    try:
        # "r|" never seeks: decompressed streams cannot.
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_CheckedInfo) as archive:
            while info := archive.next():
                # GNU tar's binary form of large sizes can be negative.
                if info.size < 0:
                    raise tarfile.ReadError(f"a size of {info.size} bytes")
                source = archive.extractfile(info) if is_read(info) else None
                content = source.read() if source else b""
                if source and len(content) < info.size:
                    raise EOFError(f"the archive ends within {info.name}")
                yield number, info, content
                number += 1
            _require_end(archive)
    except DAMAGED as error:
        raise StageError(
            f"{name} cannot be read as tar: member {number:,}: {error}\n"
            "  It may be truncated or of another type: write it again, or set ds_type."
        ) from error


def _require_end(archive: tarfile.TarFile) -> None:
    assert archive.fileobj is not None
    block = archive.fileobj.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise EOFError("the archive ends without the two blocks of zeros that mark its end")
    while block:
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                "a block of zeros that marks the end, and more after it, as if archives were joined"
            )
        block = archive.fileobj.read(BLOCK)


class _CheckedInfo(tarfile.TarInfo):
    """Headers of which only a block of zeros ends an archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_CheckedInfo":
        """Parse one block. Raises ReadError, which `TarFile.next` does not take for an end."""
        # `TarFile.next` ends here as at a whole archive, once it has read a member.
        if not buf:
            raise tarfile.ReadError(
                "the archive ends without the blocks of zeros that mark its end"
            )
        try:
            info = super().frombuf(buf, encoding, errors)
        # A block of zeros, at which `TarFile.next` ends; `_require_end` asks for the second.
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        except tarfile.TarError as error:
            raise tarfile.ReadError(f"its header is damaged ({error})") from error
        if info.type in EXTENSIONS and not 0 <= info.size <= MAX_EXTENSION:
            raise tarfile.ReadError(
                f"a header of {info.size:,} bytes; {MAX_EXTENSION:,} are allowed"
            )
        return info
