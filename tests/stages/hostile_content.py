"""Content that is drawn whole rather than damaged: archives, images that claim much, and what is no
file at all."""

import io
import os
import socket
import stat
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.media.pictures import picture, png_chunk, png_header

# Images that stand for more than they have.

SIDES = [0, 1, 9_459, 10_000, 65_535, 100_000, (1 << 31) - 1, (1 << 32) - 1]


def _before_end(png: bytes, *chunks: bytes) -> bytes:
    """A PNG with more chunks, before its pixels or after them."""
    at = png.index(b"IDAT") - 4 if len(chunks) % 2 else png.index(b"IEND") - 4
    return png[:at] + b"".join(chunks) + png[at:]


def image_bomb(draw: Random) -> bytes:
    """A small image file that claims a huge size, or holds what expands to one."""
    width, height = draw.choice(SIDES), draw.choice(SIDES)
    short = min(width, 65_535), min(height, 65_535)
    zeros = zlib.compress(bytes(200 << 20), 1)
    jpeg, gif, bmp = picture(1, kind="JPEG"), picture(1, kind="GIF"), picture(1, kind="BMP")
    frame = next(jpeg.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in jpeg)
    tiff = picture(1, kind="TIFF")
    webp = b"VP8X" + struct.pack("<II", 10, 0) + (draw.randrange(1 << 24)).to_bytes(3, "little") * 2
    return draw.choice(
        [
            lambda: png_header(width, height),
            lambda: png_header(draw.randrange(1, 90_000), draw.randrange(1, 1000)),
            lambda: jpeg[: frame + 5] + struct.pack(">HH", *short) + jpeg[frame + 9 :],
            lambda: gif[:6] + struct.pack("<HH", *short) + gif[10:],
            lambda: bmp[:18] + struct.pack("<II", width, height) + bmp[26:],
            lambda: _with_tiff_entry(tiff, draw.choice([256, 257, 258, 277, 278, 279]), width),
            lambda: b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
            lambda: _before_end(picture(1), png_chunk(b"zTXt", b"a\0\0" + zeros)),
            lambda: _before_end(picture(1), png_chunk(b"iCCP", b"a\0\0" + zeros)),
            lambda: _before_end(picture(1), png_chunk(b"iTXt", b"a\0\1\0\0\0" + zeros)),
            lambda: _before_end(picture(1), *[png_chunk(b"tEXt", b"a\0" + b"x" * 9)] * 20_000),
            lambda: _before_end(picture(1), png_chunk(b"eXIf", b"MM\0*" + b"\xff" * 60_000)),
            lambda: _before_end(png_header(60, 40), png_chunk(b"IDAT", zeros)),
            lambda: picture(1, kind="GIF") + gif[gif.index(b",") : -1] * 4000 + b";",
        ]
    )()


def _with_tiff_entry(tiff: bytes, tag: int, value: int) -> bytes:
    at = struct.unpack_from("<I", tiff, 4)[0] + 2
    while at < len(tiff) and struct.unpack_from("<H", tiff, at)[0] != tag:
        at += 12
    return tiff[: at + 2] + struct.pack("<HII", 4, 1, value) + tiff[at + 12 :]


# Zip archives, which are not read, whatever they hold and are called.


def archive(draw: Random) -> bytes:
    """A zip archive as those that write outside of their folder, expand to much, or overlap."""
    out = io.BytesIO()
    names = [
        "rows.jsonl",
        "/etc/passwd",
        "../../a.jsonl",
        "C:\\a",
        "a\0b",
        "é\u202e.json",
        "a/" * 99,
    ]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for _ in range(draw.randrange(5)):
            info = zipfile.ZipInfo(draw.choice(names))
            info.external_attr = draw.choice([0, (stat.S_IFLNK | 0o777) << 16])
            info.flag_bits = draw.choice([0, 1])  # encrypted
            with suppress(UserWarning):
                file.writestr(info, draw.choice([b'{"text": "a"}\n', b"/etc", bytes(1 << 20)]))
    content = bytearray(out.getvalue())
    if draw.random() < 0.6 and (at := content.rfind(b"PK\x01\x02")) >= 0:
        # Sizes and places of the last entry, as of zip64 or of an entry that overlaps others.
        lie = draw.choice([0, (1 << 32) - 1, 1 << 31])
        struct.pack_into("<I", content, at + draw.choice([20, 24, 42]), lie)
    nested = io.BytesIO()
    if draw.random() < 0.3:
        with zipfile.ZipFile(nested, "w") as file:
            file.writestr("inner.zip", bytes(content))
        return nested.getvalue()
    return bytes(content)


# What is no file.


def no_file(path: Path, draw: Random) -> None:
    """A pipe, a socket, a device, a folder, or a link that leads nowhere or to any of these."""
    kind = draw.choice(["pipe", "socket", "folder", "link", *DEVICES])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            folder = os.open(path.parent, os.O_RDONLY)
            end.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of at most 107 bytes
            os.close(folder)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(draw.choice(["nowhere", path.name]) if kind == "link" else kind)


DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/tty", "/proc/self/mem"]
