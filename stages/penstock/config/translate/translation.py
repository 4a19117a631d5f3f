"""A translation and its report: each foreign key, the settings it became, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.config.schema.pipeline import SECRET
from penstock.core.remote.urls import redact_text

# What became of a key. refused: nothing, and without it the run would train another model, other
# data or another objective; unknown: nothing; left out: nothing, although the run differs by it;
# doubtful: a value that may not do what was intended; approximated: a similar one; no effect:
# nothing, as it has none here; assumed: a default of the tool; translated: a converted value; maps:
# the same value under our name.
Kind = Literal[
    "refused", "unknown", "left out", "doubtful", "approximated", "no effect", "assumed",
    "translated", "maps",
]  # fmt: skip

# In the order of importance for the user.
KINDS: tuple[Kind, ...] = get_args(Kind)

# Kinds with which a foreign file is not run as it is.
FATAL: tuple[Kind, ...] = ("refused", "unknown")

# Kinds of keys that are not translated.
GAPS: tuple[Kind, ...] = (*FATAL, "left out")

# Not None, which settings may have.
MISSING = object()


@dataclass
class Line:
    """One foreign key in the report."""

    key: str
    value: Any
    kind: Kind
    why: str = ""
    # The settings of ours that it decides.
    names: list[str] = field(default_factory=list[str])

    @property
    def redacted_value(self) -> Any:
        if SECRET.search(self.key.rpartition(".")[2]):
            return "(secret)"
        return redact_text(self.value) if isinstance(self.value, str) else self.value


class Draft:
    """A translation in progress. Settings have dotted names (`train.lr`)."""

    def __init__(
        self, written: Mapping[str, Any], defaults: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        # The folder with the file, which may have others beside it.
        self.folder = folder or Path()
        # Their keys, flat, as they stand in the file; without those that are null.
        self.written = written
        self.settings: dict[str, Any] = {}
        self.lines: dict[str, Line] = {}
        # Settings that a run needs and the file does not have, with the values that its other keys
        # would give them.
        self.placeholders: dict[str, Any] = {}
        self._defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a foreign key: as written, else the assumed one, else `default`."""
        return self.written.get(key, self._defaults.get(key, default))

    def value(self, name: str, default: Any = None) -> Any:
        return value_at(self.settings, name, default)

    def sources(self, name: str) -> list[dict[str, Any]]:
        """The data sets of `data.datasets` or `data.test_datasets`; none if it is not set."""
        return self.value(name) or []

    def has(self, name: str) -> bool:
        return self.value(name, MISSING) is not MISSING

    def put(self, name: str, value: Any) -> None:
        """Set a setting that no single key decides."""
        put_at(self.settings, name, value)

    def change(self, name: str, value: Any, why: str) -> None:
        """Set another value than was asked for, and mark its keys as approximated."""
        self.put(name, value)
        for line in self.lines_of(name):
            line.kind, line.why = "assumed" if line.kind == "assumed" else "approximated", why

    def mark_doubtful(self, name: str, why: str) -> None:
        """Mark the keys that decide a setting as doubtful, assumed ones too."""
        for line in self.lines_of(name):
            if line.kind not in GAPS:
                line.kind, line.why = "doubtful", f"{line.why}; {why}" if line.why else why

    def drop(self, name: str, why: str, kind: Kind = "no effect") -> None:
        """Remove a setting. `kind` is that of keys that decide nothing else."""
        if not self.has(name):
            return
        *above, last = name.split(".")
        for line in self.lines_of(name):
            line.names = [setting for setting in line.names if not _is_within(setting, name)]
            line.why = why
            if line.kind != "assumed":
                line.kind = "approximated" if line.names else kind
            elif not line.names:
                del self.lines[line.key]
        section = self.value(".".join(above)) if above else self.settings
        if isinstance(section, dict):
            cast("dict[str, Any]", section).pop(last, None)

    def rename(self, name: str, new_name: str) -> None:
        if not self.has(name):
            return
        lines, value = self.lines_of(name), self.value(name)
        above, _, last = name.rpartition(".")
        self.value(above).pop(last)
        self.put(new_name, value)
        for line in lines:
            line.names = [new_name if current == name else current for current in line.names]

    def set_line(self, key: str, kind: Kind, why: str, *names: str) -> None:
        """Set the kind and reason of a foreign key in the report, and add settings it decides."""
        line = self.lines.setdefault(key, Line(key, self.get(key), kind))
        line.kind, line.why = kind, why
        line.names += names

    def lines_of(self, name: str) -> list[Line]:
        """The lines of the keys that decide a setting, or a part of it."""
        lines = self.lines.values()
        return [line for line in lines if any(_is_within(setting, name) for setting in line.names)]


class Entry:
    """One foreign key with its value, for its rule."""

    def __init__(
        self, draft: Draft, line: Line, into: str = "", beside: Mapping[str, Any] | None = None
    ) -> None:
        self.draft = draft
        self.key = line.key
        # Prefix of the settings that `put` sets: the item of a list that the key is in.
        self.into = f"{into}." if into else ""
        # The item with the key, as written.
        self.beside = beside or {}
        self.value: Any = line.value
        self.line = line
        # Whether the rule has put or said anything.
        self.is_handled = False

    @property
    def is_assumed(self) -> bool:
        """Whether it is a default of the tool and not written."""
        return self.line.kind == "assumed"

    def get(self, key: str, default: Any = None) -> Any:
        return self.draft.get(key, default)

    def put(self, name: str, value: Any) -> None:
        """Set a setting of ours, within the item that the key is in, and record that this key
        decides it."""
        self.draft.put(f"{self.into}{name}", value)
        self.decides(f"{self.into}{name}")

    def assume(self, name: str, value: Any, why: str) -> None:
        """Set what the tool does unasked, for which it has no key."""
        self.draft.put(name, value)
        key = f"{self.key} (unasked)"
        self.draft.lines.setdefault(key, Line(key, value, "assumed", why, [name]))

    def decides(self, *names: str) -> None:
        """Record that this key affects settings that the rule of another key sets."""
        self.line.names += [name for name in names if name not in self.line.names]
        self.is_handled = True

    def approximated(self, why: str) -> None:
        """The value that was set is similar, but not the same."""
        self._set_line("approximated", why)

    def doubtful(self, why: str) -> None:
        """The value that was set may not do what was intended; the user must check it."""
        self._set_line("doubtful", why)

    def no_effect(self, why: str) -> None:
        """Nothing was set, and nothing is missing."""
        self._set_line("no effect", why)

    def explain(self, why: str) -> None:
        """The value that was set is the same, for a reason that the report gives."""
        self._set_line(self.line.kind, why)

    def leave_out(self, why: str) -> None:
        """There is no setting for this value, and the run differs by it."""
        self._set_line("left out", why)

    def refuse(self, why: str) -> None:
        """The value decides what is trained, and there is no setting for it."""
        self._set_line("refused", why)

    def _set_line(self, kind: Kind, why: str) -> None:
        self.is_handled = True
        self.line.why = why
        # A default that nothing comes of is not worth a line; one that comes near stays assumed.
        if not self.is_assumed or kind in (*GAPS, "doubtful"):
            self.line.kind = kind


# Translates one key to settings of ours (`Entry.put`), or says why it has none.
Rule = Callable[[Entry], None]


@dataclass(frozen=True)
class Translation:
    """A foreign file as settings of ours."""

    # The name of its dialect.
    dialect: str
    # The name of the tool.
    title: str
    # As in a native file, in the order of the schema.
    settings: Mapping[str, Any]
    # The report: a line for each foreign key and for each assumed default.
    lines: Sequence[Line]
    # Number of processes that parallel sizes were fitted to.
    ranks: int
    # Settings that a run needs and the file does not have, with values for validation.
    placeholders: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def origins(self, name: str) -> tuple[str, ...]:
        """The foreign keys that decide a setting: written ones before assumed ones, and of these
        first those that decide only this setting."""
        ranked: list[tuple[bool, int, str]] = []
        for line in self.lines:
            if lengths := [len(setting) for setting in line.names if self._decides(setting, name)]:
                ranked.append((line.kind == "assumed", -max(lengths), line.key))
        return tuple(key for *_, key in sorted(ranked, key=lambda entry: entry[:2]))

    def _decides(self, decided: str, name: str) -> bool:
        # Whether the key of a setting decides `name`: a part of it only if there is that part.
        if _is_within(name, decided):
            return True
        has_part = value_at(self.settings, decided, MISSING) is not MISSING
        return _is_within(decided, name) and has_part

    def of(self, *kinds: Kind) -> list[Line]:
        return [line for line in self.lines if line.kind in kinds]


def put_at(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set the value at a dotted name in nested mappings, which are created as needed, and lists,
    whose items exist."""
    *above, last = name.split(".")
    parent: Any = settings
    for step in above:
        parent = cast(
            "Any", parent[int(step)] if isinstance(parent, list) else parent.setdefault(step, {})
        )
    parent[last] = value


def value_at(settings: Any, name: str, default: Any = None) -> Any:
    """The value at a dotted name in nested mappings and lists."""
    value = settings
    for step in name.split("."):
        if isinstance(value, list):
            entries = cast("list[Any]", value)
            if not step.isdecimal() or int(step) >= len(entries):
                return default
            value = entries[int(step)]
        elif isinstance(value, dict) and step in value:
            value = cast("dict[str, Any]", value)[step]
        else:
            return default
    return value


def _is_within(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")
