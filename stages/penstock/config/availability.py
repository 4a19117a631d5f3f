"""Marks on fields whose values cannot all be honoured yet.

A field that is accepted and ignored is worse than one that is missing: whoever writes it believes
in it. So the schema is complete from the start, and what has no code behind it is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from penstock.config.faults import Fault, Steps, shown
from penstock.config.section import Section


@dataclass(frozen=True)
class Later:
    """The field is not implemented: only its default, and the values in `allowed`, are accepted."""

    allowed: tuple[Any, ...] = ()


def mark_of(field: FieldInfo) -> Later | None:
    """The mark a field bears, if any."""
    return next((mark for mark in field.metadata if isinstance(mark, Later)), None)


def accepted(field: FieldInfo, mark: Later) -> list[Any]:
    """The values a field marked `Later` takes: its default first."""
    default = field.get_default(call_default_factory=True, validated_data={})
    return [default, *(value for value in mark.allowed if not same(value, default))]


def same(one: Any, other: Any) -> bool:
    """Equality that tells `0` from `false` and `1` from `true`."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def unavailable(section: Section, at: Steps = ()) -> Iterator[Fault]:
    """Every value in `section`, and in the sections within it, that has no code behind it yet."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        mark = mark_of(field)
        path = (*at, name)
        if isinstance(value, Section):
            yield from unavailable(value, path)
        elif isinstance(value, list):
            for index, entry in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                if isinstance(entry, Section):
                    yield from unavailable(entry, (*path, index))
        if mark:
            values = accepted(field, mark)
            if not any(same(value, one) for one in values):
                yield Fault(path, _not_yet(values, field))


def _not_yet(values: list[Any], field: FieldInfo) -> str:
    default, *others = values
    written = [shown(value) for value in (others if default is None and others else values)]
    if field.default is None and not others:
        return "not available yet; leave it out"
    listed = written[0] if len(written) == 1 else f"{', '.join(written[:-1])} or {written[-1]}"
    return f"not available yet; write {listed}, or leave it out"
