"""The formats of quantized base weights, and what groups of columns they may share scales in.

No torch here: what does not fit is refused before anything heavy is imported.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

QuantFormat = Literal["nvfp4", "block_fp8", "nf4", "int8", "int8_int4_experts"]

DEFAULT: QuantFormat = "nvfp4"

PAIRS: Mapping[str, tuple[str, str]] = {"int8_int4_experts": ("int8", "int4")}
"""Formats that are two: of linear layers, and of experts."""

_POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

GROUPS: Mapping[QuantFormat, tuple[int, ...]] = {
    "nvfp4": (16,),
    "block_fp8": (128,),
    "nf4": (64, *_POWERS),
    "int8": (),
    "int8_int4_experts": (128, *_POWERS),
}
"""Columns that may share a scale, the format's own first; with none, each row has one."""


def cut_at(format: QuantFormat, group: int | None) -> int:
    """What columns of linear layers can be cut at multiples of."""
    if format in PAIRS or not GROUPS[format]:
        return 1
    return group or GROUPS[format][0]


def readable(entries: list[str] | None) -> list[str] | None:
    """Entries for `is_among`. Raises ValueError for a regular expression that is none."""
    for entry in entries or ():
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{entry} is no regular expression: {error}") from None
    return entries


def is_among(entries: Sequence[str], layer: str) -> bool:
    """Whether one of the entries names a layer or what it is part of.

    An entry is a run of the parts of a name (`self_attn`, `layers.0`), a pattern of whole names
    with `*`, `?` or `[...]`, or with `re:` before it a regular expression that names begin with.
    """
    return any(names_layer(entry, layer) for entry in entries)


def names_layer(entry: str, layer: str) -> bool:
    """The same of one entry."""
    if entry.startswith("re:"):
        return re.match(entry[3:], layer) is not None
    if any(sign in entry for sign in "*?["):
        return fnmatchcase(layer, entry) or fnmatchcase(layer, f"*.{entry}")
    return f".{entry}." in f".{layer}."
