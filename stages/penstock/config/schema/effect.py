"""When a field has an effect, declared with its type.

`Annotated[Keyed[float], OnlyWith("train.optimizer", ("muon",))]` has an effect with Muon only.
Cache keys read this (`config/identity.py`: a value without effect is in no key), and so do the
rules (`rules/effect.py`: it is an error or a notice) and the reference page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

from penstock.config.schema.base import ConfigSection

Root = TypeVar("Root", bound=ConfigSection)
Section = TypeVar("Section", bound=ConfigSection)


@dataclass(frozen=True)
class OnlyWith:
    """The field has an effect only where a setting, or a property of its section, has one of these
    values. If there are several conditions, all must hold. Conditions of a whole section are in its
    class attribute `conditions`."""

    setting: str
    """Dotted name from the root, such as `train.optimizer`."""

    values: tuple[Any, ...] = (True,)

    words: str = ""
    """What to write so that the field has an effect, where that is not `setting: value`."""

    why: str = "is not used with {name}: {value}"
    """Why a value has no effect. `{name}` and `{value}` are those of the setting."""

    unmet: Literal["error", "notice", "silent"] = "error"
    """What a value without effect is. `silent`: the setting is documented to override it."""

    @property
    def name(self) -> str:
        """The last part of the setting's name."""
        return self.setting.rpartition(".")[2]

    def holds(self, run: ConfigSection) -> bool:
        """Whether the setting has one of the values."""
        return attrgetter(self.setting)(run) in self.values


TRAINS = OnlyWith("train.eval_only", (False,), unmet="silent")
"""The condition of what only training uses."""


class Unused(NamedTuple):
    """A field that has no effect in a run."""

    path: tuple[str, ...]
    section: ConfigSection
    condition: OnlyWith
    """The first condition that does not hold."""

    @property
    def is_default(self) -> bool:
        """Whether the field has its default."""
        return not self.section.is_non_default(self.path[-1])


@cache
def conditions_of(section: type[ConfigSection], name: str) -> tuple[OnlyWith, ...]:
    """The conditions of a field: those of the class that declares it, and its own."""
    owner = next(base for base in section.__mro__ if name in get_annotations(base))
    metadata = section.model_fields[name].metadata
    own = (condition for condition in metadata if isinstance(condition, OnlyWith))
    return (*own, *owner.__dict__.get("conditions", ()))


def unused_fields(run: ConfigSection) -> Iterator[Unused]:
    """The fields that have no effect in the run, whatever their values."""
    return _unused_fields(run, run, ())


def without_unused(run: Root) -> Root:
    """The run in which every field that has no effect has its default."""
    unused = {field.path for field in unused_fields(run) if not field.is_default}
    return _with_defaults(run, (), unused) if unused else run


def _unused_fields(
    run: ConfigSection, section: ConfigSection, path: tuple[str, ...]
) -> Iterator[Unused]:
    for name in type(section).model_fields:
        value, field_path = getattr(section, name), (*path, name)
        if isinstance(value, ConfigSection):
            yield from _unused_fields(run, value, field_path)
            continue
        for condition in conditions_of(type(section), name):
            if not condition.holds(run):
                yield Unused(field_path, section, condition)
                break


def _with_defaults(
    section: Section, path: tuple[str, ...], unused: set[tuple[str, ...]]
) -> Section:
    changed: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, field_path = getattr(section, name), (*path, name)
        if field_path in unused:
            changed[name] = field.get_default(call_default_factory=True)
        elif isinstance(value, ConfigSection):
            changed[name] = _with_defaults(value, field_path, unused)
    return section.model_copy(update=changed)
