"""Formatting of numbers and layouts for reports and logs."""

import math
from collections.abc import Mapping
from typing import Any


def layout_text(layout: Mapping[str, Any]) -> str:
    """The parallel axes with more than one rank."""
    axes = {name: size for name, size in layout.items() if size not in (1, "1", None)}
    return ", ".join(f"{name} {size}" for name, size in axes.items()) or "one rank"


def number(value: float | None) -> str:
    """Four significant digits; small ones in scientific notation, as for learning rates."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def amount(value: float) -> str:
    """A count with three digits and a unit suffix."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 999.5 * size
                else f"{value / size:.0f} {unit}"
            )
    return f"{value:.3g}"


def share(value: float) -> str:
    """A fraction in per cent."""
    return f"{value:.1%}"


def gibibytes(value: float) -> str:
    """Bytes in GiB."""
    return f"{value:.3g} GiB"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, the two largest of them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {secs} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def when(time: str) -> str:
    """An ISO 8601 time, to the minute."""
    return time[:16].replace("T", " ") + (" UTC" if time.endswith(("+00:00", "Z")) else "")


def plain(value: Any) -> str:
    """A setting in YAML notation."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return f"[{', '.join(plain(item) for item in value)}]"
    return str(value)
