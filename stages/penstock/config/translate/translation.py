"""A translation while it is made: what was written there, what it has become here, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from penstock.config.schema.pipeline import SECRET
from penstock.core.remote.urls import redact_text

Kind = Literal[
    "maps",
    "translated",
    "approximated",
    "doubtful",
    "no effect",
    "assumed",
    "unknown",
    "refused",
]
"""What becomes of a key: its value under our name; another way to say the same; something near it;
a setting that may not do what was meant; nothing, for it has no meaning here; its default there;
nothing, for nobody here knows it; or nothing, and the file cannot be used with it."""

KINDS: tuple[Kind, ...] = (
    "refused", "unknown", "doubtful", "approximated", "no effect", "assumed", "translated",
    "maps",
)  # fmt: skip
"""Those that a person should look at first."""


@dataclass
class Line:
    """What the report says of one foreign key."""

    key: str
    value: Any
    kind: Kind
    why: str = ""
    names: list[str] = field(default_factory=list[str])
    """The settings of ours that it decides."""

    @property
    def told(self) -> Any:
        """The value as it may be shown to anyone: without what is secret."""
        if SECRET.search(self.key.rpartition(".")[2]):
            return "(secret)"
        return redact_text(self.value) if isinstance(self.value, str) else self.value


class Draft:
    """The run that grows out of a foreign file. Settings are named with dots (`train.lr`)."""

    def __init__(self, written: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.written = written
        """Their keys, flat, as they stand in the file; without those that are null."""
        self.settings: dict[str, Any] = {}
        """Ours, nested."""
        self.lines: dict[str, Line] = {}
        """The report, by their key."""
        self._defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """What their key says: as written, else as it is assumed, else `default`."""
        return self.written.get(key, self._defaults.get(key, default))

    def value(self, name: str, default: Any = None) -> Any:
        """What a setting of ours is by now."""
        return value_at(self.settings, name, default)

    def has(self, name: str) -> bool:
        """Whether a setting of ours has been given a value."""
        missing = object()
        return self.value(name, missing) is not missing

    def put(self, name: str, value: Any) -> None:
        """Give a setting of ours a value that no single key decides."""
        put_at(self.settings, name, value)

    def change(self, name: str, value: Any, why: str) -> None:
        """Give a setting another value than was asked for: its keys are told as approximated."""
        self.put(name, value)
        for line in self.lines_of(name):
            line.kind = line.kind if line.kind == "assumed" else "approximated"
            line.why = why

    def doubt(self, name: str, why: str) -> None:
        """Tell the keys that decide a setting as doubtful, assumed ones too."""
        for line in self.lines_of(name):
            if line.kind != "refused":
                line.kind, line.why = "doubtful", f"{line.why}; {why}" if line.why else why

    def drop(self, name: str, why: str, kind: Kind = "no effect") -> None:
        """Leave a setting out again. `kind` is how keys that decide nothing else are told."""
        if not self.has(name):
            return
        *above, last = name.split(".")
        for line in list(self.lines_of(name)):
            line.names = [other for other in line.names if not _is_within(other, name)]
            line.why = why
            if line.kind != "assumed":
                line.kind = "approximated" if line.names else kind
            elif not line.names:
                del self.lines[line.key]
        section = self.value(".".join(above)) if above else self.settings
        if isinstance(section, dict):
            cast("dict[str, Any]", section).pop(last, None)

    def rename(self, name: str, other: str) -> None:
        """Call a setting of ours otherwise, if it has been given a value."""
        if not self.has(name):
            return
        lines, value = list(self.lines_of(name)), self.value(name)
        above, _, last = name.rpartition(".")
        self.value(above).pop(last)
        self.put(other, value)
        for line in lines:
            line.names = [other if one == name else one for one in line.names]

    def say(self, key: str, kind: Kind, why: str) -> None:
        """What the report says of one of their keys."""
        line = self.lines.setdefault(key, Line(key, self.get(key), kind))
        line.kind, line.why = kind, why

    def lines_of(self, name: str) -> Iterator[Line]:
        """The lines of the keys that decide a setting, or a part of it."""
        return (
            line
            for line in self.lines.values()
            if any(_is_within(other, name) for other in line.names)
        )


class Entry:
    """One foreign key with its value, for the rule that translates it."""

    def __init__(self, draft: Draft, line: Line) -> None:
        self.draft = draft
        self.key = line.key
        self.value: Any = line.value
        self.line = line
        self.is_said = False
        """Whether the rule has put or said anything."""

    @property
    def is_assumed(self) -> bool:
        """Whether it is a default there, and not written."""
        return self.line.kind == "assumed"

    def get(self, key: str, default: Any = None) -> Any:
        """What another of their keys says."""
        return self.draft.get(key, default)

    def put(self, name: str, value: Any) -> None:
        """Give a setting of ours a value, and note that this key decides it."""
        self.draft.put(name, value)
        self.decides(name)

    def decides(self, *names: str) -> None:
        """Note that this key has a part in settings that the rule of another one puts."""
        self.line.names += [name for name in names if name not in self.line.names]
        self.is_said = True

    def approximated(self, why: str) -> None:
        """What was put is near to what was asked for, and not the same."""
        self._say("approximated", why)

    def doubtful(self, why: str) -> None:
        """What was put may not mean there what it means here; a person has to look."""
        self._say("doubtful", why)

    def no_effect(self, why: str) -> None:
        """Nothing was put, and nothing is missing."""
        self._say("no effect", why)

    def explain(self, why: str) -> None:
        """What was put is the same, and it is worth a word why."""
        self._say(self.line.kind, why)

    def refuse(self, why: str) -> None:
        """The file cannot be used with this."""
        self._say("refused", why)

    def _say(self, kind: Kind, why: str) -> None:
        self.is_said = True
        self.line.why = why
        # A default that nothing comes of is not worth a line; one that comes near stays assumed.
        if not self.is_assumed or kind in ("refused", "doubtful"):
            self.line.kind = kind


@dataclass(frozen=True)
class Translation:
    """A foreign file in our own words."""

    dialect: str
    """The name of its dialect."""

    title: str
    """What its tool calls itself."""

    settings: Mapping[str, Any]
    """As a native file would say it, in the order of the schema."""

    lines: Sequence[Line]
    """The report: one line for each of their keys, and for each default of theirs."""

    ranks: int
    """Processes that parallel sizes were fitted to."""

    lacks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a run needs and such a file never says, with a value for judging all the rest."""

    def origins(self, name: str) -> tuple[str, ...]:
        """The foreign keys that decide a setting of ours: those written before those assumed, and
        of these those first that decide it alone."""
        found: list[tuple[bool, int, str]] = []
        for line in self.lines:
            if lengths := [len(other) for other in line.names if _meet(other, name)]:
                found.append((line.kind == "assumed", -max(lengths), line.key))
        return tuple(key for *_, key in sorted(found, key=lambda one: one[:2]))

    def of(self, *kinds: Kind) -> list[Line]:
        """The lines of some kinds, in the order of the file."""
        return [line for line in self.lines if line.kind in kinds]


def put_at(settings: dict[str, Any], name: str, value: Any) -> None:
    """Let a value stand at a dotted name in nested mappings, which are made as they are needed."""
    *above, last = name.split(".")
    at = settings
    for step in above:
        at = at.setdefault(step, {})
    at[last] = value


def value_at(settings: Any, name: str, default: Any = None) -> Any:
    """What stands at a dotted name in nested mappings and lists."""
    at = settings
    for step in name.split("."):
        if isinstance(at, list):
            entries = cast("list[Any]", at)
            if not step.isdecimal() or int(step) >= len(entries):
                return default
            at = entries[int(step)]
        elif isinstance(at, dict) and step in at:
            at = cast("dict[str, Any]", at)[step]
        else:
            return default
    return at


def _is_within(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")


def _meet(one: str, other: str) -> bool:
    return _is_within(one, other) or _is_within(other, one)
