"""Formats and group sizes of quantized base weights, and names of modules in a config.

No torch here: an invalid value is an error before torch is imported.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

QuantFormat = Literal["nvfp4", "block_fp8", "nf4", "int8", "int8_int4_experts"]

DEFAULT: QuantFormat = "nvfp4"

# Formats with different formats for linear layers and for experts.
PAIRS: Mapping[str, tuple[str, str]] = {"int8_int4_experts": ("int8", "int4")}

_POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# Allowed group sizes (columns that share a scale), the default first; none: a scale for each row.
GROUPS: Mapping[QuantFormat, tuple[int, ...]] = {
    "nvfp4": (16,),
    "block_fp8": (128,),
    "nf4": (64, *_POWERS),
    "int8": (),
    "int8_int4_experts": (128, *_POWERS),
}


def cut_at(format: QuantFormat, group: int | None) -> int:
    """What columns of linear layers can be cut at multiples of."""
    if format in PAIRS or not GROUPS[format]:
        return 1
    return group or GROUPS[format][0]


def readable(entries: list[str] | None) -> list[str] | None:
    """Check entries for `is_among`. Raises ValueError for an invalid regular expression."""
    for entry in entries or ():
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{entry} is not a valid regular expression: {error}") from None
    return entries


def is_among(entries: Sequence[str], layer: str) -> bool:
    """Whether one of the entries matches a layer or a module that contains it.

    An entry is one or more consecutive parts of a name (`self_attn`, `layers.0`), a pattern of full
    names with `*`, `?` or `[...]`, or, after `re:`, a regular expression that matches the beginning
    of names.
    """
    return any(names_layer(entry, layer) for entry in entries)


def names_layer(entry: str, layer: str) -> bool:
    """The same for one entry."""
    if entry.startswith("re:"):
        return re.match(entry[3:], layer) is not None
    if any(sign in entry for sign in "*?["):
        return fnmatchcase(layer, entry) or fnmatchcase(layer, f"*.{entry}")
    # With a dot at both ends only whole parts match: `proj` is none of `q_proj`.
    return f".{entry}." in f".{layer}."
