"""What a field goes with, declared with its type.

`Annotated[Keyed[float], OnlyWith("train.optimizer", ("muon",))]` has an effect with Muon only, and
`Annotated[Unkeyed[bool], NotWith("lora.use_dora", why=...)]` is an error with DoRA. Cache keys
read the first (`config/identity.py`: a value without effect is in no key); the rules
(`rules/effect.py`) and the reference page read both.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, cast

from penstock.config.schema.base import ConfigSection

Root = TypeVar("Root", bound=ConfigSection)
Section = TypeVar("Section", bound=ConfigSection)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Condition:
    # Dotted name from the root, such as `train.optimizer`, of a setting or of a property of a
    # section; `.type` is a setting beside the field.
    setting: str
    values: tuple[Any, ...] = (True,)
    # If given, all values but these are meant, in place of `values`.
    unless: tuple[Any, ...] | None = None
    # Values of the field that the condition is for. None: all but its default.
    of: tuple[Any, ...] | None = None
    # Values of the field that the condition is not for.
    spares: tuple[Any, ...] = ()
    # `{name}` and `{value}` are those of the setting, `{field}` and `{own}` those of the field.
    why: str = "is not used with {name}: {value}"
    # The settings that a property in `setting` reads: if one is invalid, no error follows.
    reads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.setting.rpartition(".")[2]

    def value_in(self, run: ConfigSection, section: ConfigSection) -> Any:
        """The setting's value; `section` has the field."""
        is_beside = self.setting.startswith(".")
        return attrgetter(self.name if is_beside else self.setting)(section if is_beside else run)

    def matches(self, run: ConfigSection, section: ConfigSection) -> bool:
        """Whether the setting, or an element of one that is a set, has one of the values."""
        value = self.value_in(run, section)
        elements: Iterable[Any] = cast("Any", value) if isinstance(value, frozenset) else (value,)
        if self.unless is None:
            return any(element in self.values for element in elements)
        return any(element not in self.unless for element in elements)

    def is_for(self, value: Any) -> bool:
        """Whether it concerns this value of the field, which is not its default."""
        return value not in self.spares and (self.of is None or value in self.of)


@dataclass(frozen=True)
class OnlyWith(_Condition):
    """The field has an effect only where a setting has one of these values. If there are several
    conditions, all must hold. Conditions of a whole section are in its class attribute
    `conditions`."""

    # What to write so that the field has an effect, where that is not `setting: value`.
    words: str = ""
    # What a value without effect is. `silent`: the setting is documented to override it.
    unmet: Literal["error", "notice", "silent"] = "error"


@dataclass(frozen=True)
class NotWith(_Condition):
    """The field is an error where a setting has one of these values."""

    # What to write.
    instead: str = "leave one of the two out"


@dataclass(frozen=True)
class NativeOnly:
    """The field has no meaning where transformers' own code computes the model."""

    why: str = "layers are computed by the model's own code"
    # What to write instead, if not nothing.
    write: str = ""


# The condition of what only training uses.
TRAINS = OnlyWith("train.eval_only", (False,), unmet="silent")


OWN_EXPERTS = NativeOnly("experts and routers are the model's own")


class DeclaredField(NamedTuple):
    """A field of a run that has conditions."""

    path: Path
    section: ConfigSection
    only_with: tuple[OnlyWith, ...]
    not_with: tuple[NotWith, ...]

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def value(self) -> Any:
        return getattr(self.section, self.name)

    @property
    def is_default(self) -> bool:
        return not self.section.is_non_default(self.name)

    def unmet(self, run: ConfigSection) -> Iterator[OnlyWith]:
        """The conditions of its value that do not hold."""
        return (
            condition
            for condition in self.only_with
            if (condition.of is None or self.value in condition.of)
            and not condition.matches(run, self.section)
        )


@cache
def conditions_of(
    section: type[ConfigSection], name: str
) -> tuple[tuple[OnlyWith, ...], tuple[NotWith, ...]]:
    """The conditions of a field: those of the class that declares it, and its own."""
    # `model_fields` has inherited fields too, and not where they were declared.
    owner = next(base for base in section.__mro__ if name in get_annotations(base))
    declared = (*owner.__dict__.get("conditions", ()), *section.model_fields[name].metadata)
    return (
        tuple(part for part in declared if isinstance(part, OnlyWith)),
        tuple(part for part in declared if isinstance(part, NotWith)),
    )


def declared_fields(section: ConfigSection, path: Path = ()) -> Iterator[DeclaredField]:
    """The fields with conditions of a section, of the sections in it, and of those in its lists and
    mappings."""
    for name in type(section).model_fields:
        value, field_path = getattr(section, name), (*path, name)
        if isinstance(value, ConfigSection):
            yield from declared_fields(value, field_path)
        elif isinstance(value, list | dict):
            entries = cast("dict[str, Any] | list[Any]", value)
            items = entries.items() if isinstance(entries, dict) else enumerate(entries)
            for key, item in items:
                if isinstance(item, ConfigSection):
                    yield from declared_fields(item, (*field_path, key))
        only_with, not_with = conditions_of(type(section), name)
        if only_with or not_with:
            yield DeclaredField(field_path, section, only_with, not_with)


def unused_fields(section: ConfigSection, run: ConfigSection) -> Iterator[DeclaredField]:
    """The fields of a section of the run that have no effect, whatever their values."""
    return (field for field in declared_fields(section) if any(field.unmet(run)))


def without_unused(run: Root) -> Root:
    """The run in which every field that has no effect has its default."""
    # Of the last run asked for: each stage asks for it, several times. A run is frozen.
    if not _LAST or _LAST[0] is not run:
        _LAST[:] = run, used_part(run, run)
    return cast("Root", _LAST[1])


_LAST: list[ConfigSection] = []


def used_part(section: Section, run: ConfigSection) -> Section:
    """The section of the run in which every field that has no effect has its default."""
    unused = {field.path for field in unused_fields(section, run) if not field.is_default}
    return _with_defaults(section, (), unused) if unused else section


def _with_defaults(section: Section, path: Path, unused: set[Path]) -> Section:
    changed: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, field_path = getattr(section, name), (*path, name)
        if field_path in unused:
            changed[name] = field.get_default(call_default_factory=True)
        elif isinstance(value, ConfigSection):
            changed[name] = _with_defaults(value, field_path, unused)
        elif isinstance(value, list):
            items = enumerate(cast("list[Any]", value))
            changed[name] = [
                _with_defaults(item, (*field_path, index), unused)
                if isinstance(item, ConfigSection)
                else item
                for index, item in items
            ]
    # A copy is not validated again: defaults are valid, and most sections are large.
    return section.model_copy(update=changed)
