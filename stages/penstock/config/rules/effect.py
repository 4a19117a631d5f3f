"""Values that a field's declaration excludes, and values of fields that have no effect."""

from collections.abc import Iterator

from penstock.config.loading.fault import ConfigIssue, Issues, dotted, shown
from penstock.config.schema.effect import DeclaredField, NotWith, OnlyWith, declared_fields
from penstock.config.schema.run import RunConfig


def check_declared(run: RunConfig) -> Issues:
    """Values that have no effect, and else values that do not go with others."""
    for field in _changed_fields(run):
        # What has no effect excludes nothing: one error of a setting is enough.
        unused = next((unmet for unmet in field.unmet(run) if _is_error(unmet, field)), None)
        violated = (
            [unused]
            if unused
            else [
                exclusion
                for exclusion in field.not_with
                if exclusion.is_for(field.value) and exclusion.matches(run, field.section)
            ]
        )
        for condition in violated:
            beside = dotted((*field.path[:-1], condition.name))
            setting = beside if condition.setting.startswith(".") else condition.setting
            reads = condition.reads or (setting,)
            yield ConfigIssue(field.path, _reason(condition, field, run), reads)


def iter_effect_notices(run: RunConfig) -> Iterator[str]:
    """Lines for values without effect that are no errors."""
    for field in _changed_fields(run):
        unmet = list(field.unmet(run))
        notices = [condition for condition in unmet if condition.unmet == "notice"]
        if notices and not any(_is_error(condition, field) for condition in unmet):
            yield f"{dotted(field.path)}: {_reason(notices[0], field, run)}"


def describe(condition: OnlyWith) -> str:
    """What to write so that a field with this condition has an effect."""
    *first_values, last = (shown(value) for value in condition.values if value is not None)
    either = f"{', '.join(first_values)} or {last}" if first_values else last
    return condition.words or f"{condition.name}: {either}"


def _changed_fields(run: RunConfig) -> Iterator[DeclaredField]:
    return (field for field in declared_fields(run) if not field.is_default)


def _is_error(condition: OnlyWith, field: DeclaredField) -> bool:
    return condition.unmet == "error" and condition.is_for(field.value)


def _reason(condition: OnlyWith | NotWith, field: DeclaredField, run: RunConfig) -> str:
    values = {
        "name": condition.name,
        "value": shown(condition.value_in(run, field.section)),
        "field": field.name,
        "own": shown(field.value),
    }
    if isinstance(condition, NotWith):
        return f"{condition.why}; {condition.instead}".format_map(values)
    why = condition.why.format_map(values)
    return f"{why}; write {describe(condition)}, or leave {field.name} out"
