"""Values of fields that have no effect in the run, by what the fields declare."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

from penstock.config.loading.fault import ConfigIssue, dotted, shown
from penstock.config.rules.data import Issues
from penstock.config.schema.effect import OnlyWith, Unused, unused_fields
from penstock.config.schema.run import RunConfig


def check_effects(run: RunConfig) -> Issues:
    """A value that is written and has no effect."""
    for field in _values_without_effect(run, "error"):
        yield ConfigIssue(field.path, _reason(field, run), (field.condition.setting,))


def iter_effect_notices(run: RunConfig) -> Iterator[str]:
    """Lines for values without effect that are no errors."""
    for field in _values_without_effect(run, "notice"):
        yield f"{dotted(field.path)}: {_reason(field, run)}"


def describe(condition: OnlyWith) -> str:
    """What to write so that a field with this condition has an effect."""
    *others, last = map(shown, condition.values)
    either = f"{', '.join(others)} or {last}" if others else last
    return condition.words or f"{condition.name}: {either}"


def _values_without_effect(run: RunConfig, unmet: Literal["error", "notice"]) -> Iterator[Unused]:
    for field in unused_fields(run):
        if field.condition.unmet == unmet and not field.is_default:
            yield field


def _reason(field: Unused, run: RunConfig) -> str:
    condition = field.condition
    value = shown(attrgetter(condition.setting)(run))
    why = condition.why.format(name=condition.name, value=value)
    return f"{why}; write {describe(condition)}, or leave {field.path[-1]} out"
