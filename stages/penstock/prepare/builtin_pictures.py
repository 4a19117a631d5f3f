"""Pictures of shapes, drawn in code: the same bytes everywhere."""

import random
import struct
import zlib
from collections.abc import Callable, Mapping

SIDE = 32

COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 40),
    "blue": (40, 60, 220),
    "yellow": (235, 215, 40),
    "purple": (140, 40, 170),
    "white": (250, 250, 250),
}

SHAPES: Mapping[str, Callable[[float, float], bool]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: max(abs(x), abs(y)) <= 0.95,
    "triangle": lambda x, y: -1 <= y <= 0.9 and abs(x) <= (y + 1) / 1.9,
    "cross": lambda x, y: min(abs(x), abs(y)) <= 0.25 and max(abs(x), abs(y)) <= 1,
}
"""Whether a point is in a shape around the origin, of a radius of 1; y points down."""


def picture_of_shape(seed: int) -> tuple[str, bytes]:
    """(a name such as `a red circle`, a PNG of 32 x 32 pixels). Seeds count through all pairs of a
    color and a shape; each has its size and place, on a grey ground."""
    draw = random.Random(seed)
    shape = list(SHAPES)[seed % len(SHAPES)]
    color = list(COLORS)[seed // len(SHAPES) % len(COLORS)]
    radius = 11 + 2 * draw.random()
    center = [SIDE / 2 + 4 * (draw.random() - 0.5) for _ in range(2)]
    ground = bytes([int(60 + 80 * draw.random())] * 3)
    inside, paint = SHAPES[shape], bytes(COLORS[color])
    rows = [
        b"".join(
            paint
            if inside((x + 0.5 - center[0]) / radius, (y + 0.5 - center[1]) / radius)
            else ground
            for x in range(SIDE)
        )
        for y in range(SIDE)
    ]
    return f"a {color} {shape}", write_png(rows)


def write_png(rows: list[bytes]) -> bytes:
    """An RGB image as PNG, stored without compression, so that its bytes depend on no library."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    # Width, height, 8 bits, RGB; then the only compression and filter methods, and no interlacing.
    header = struct.pack(">IIBBBBB", len(rows[0]) // 3, len(rows), 8, 2, 0, 0, 0)
    # Each row begins with the type of its filter, here none.
    pixels = b"".join(b"\0" + row for row in rows)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(pixels, 0)),
            chunk(b"IEND", b""),
        )
    )
