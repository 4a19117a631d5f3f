"""Unusable and dropped records: reasons, locations and counts."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from penstock.config.schema.dataset import LOSS_WEIGHT_LIMITS

Reason = Literal[
    "invalid_json",
    "missing_column",
    "wrong_type",
    "bad_value",
    "template",
    "empty",
    "no_trained_tokens",
    "same_answers",
    "too_long",
]

DROP_REASONS = ("empty", "no_trained_tokens", "same_answers", "too_long")
"""Reasons that drop a record but do not count as unusable (`data.bad_rows_allowed`)."""

MAX_EXAMPLES = 30
EXAMPLES_PER_CAUSE = 3
"""Maximum examples per cause."""
# A cause may quote its record, so every record of a damaged file could be one of its own.
MAX_CAUSES = 50
"""Maximum distinct causes; further ones are counted together."""
MAX_CAUSES_SHOWN = 10
OTHER = "other causes"


class BadRecord(Exception):  # noqa: N818 - caught within this package
    """The record cannot become a sample."""

    def __init__(self, reason: Reason, why: str) -> None:
        # Names from records may contain lone surrogates, which cannot be written to files.
        self.why = why.encode(errors="backslashreplace").decode()
        self.reason: Reason = reason
        super().__init__(self.why)


def get_column(record: Mapping[str, Any], name: str) -> Any:
    """The record's value. Raises BadRecord with the record's columns and the closest name."""
    if name in record:
        return record[name]
    near = difflib.get_close_matches(name, list(record), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise BadRecord("missing_column", f"no column {name!r}; it has {', '.join(record)}{hint}")


def get_text(record: Mapping[str, Any], name: str) -> str:
    """The record's value, which must be a string."""
    return check_text(name, get_column(record, name))


def get_number(record: Mapping[str, Any], name: str) -> float:
    """The record's value, which must be a finite number."""
    return check_number(name, get_column(record, name))


def check_number(location: str, value: Any) -> float:
    """`value`, which must be a finite number."""
    # A bool is an int in Python: `true` would pass for a weight or a score of 1.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(location, value, "a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number may have any number of digits
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise BadRecord("bad_value", f"{location} is {number}")
    return number


def check_weight(location: str, value: Any) -> float:
    """`value`, which must be a loss weight."""
    weight = check_number(location, value)
    smallest, largest = LOSS_WEIGHT_LIMITS
    if weight and not smallest <= weight <= largest:
        why = f"{location} is {weight:g}; a loss weight is 0, or from {smallest:g} to {largest:g}"
        raise BadRecord("bad_value", why)
    return weight


def check_text(location: str, value: Any) -> str:
    """Return `value`, which must be a string that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise wrong_type(location, value, "a string")
    # CPython keeps this as a flag of each string; to encode takes a copy.
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        why = f"{location} is not text: half of a surrogate pair at character {error.start + 1}"
        raise BadRecord("bad_value", why) from None
    return value


def get_optional_text(record: Mapping[str, Any], name: str | None) -> str:
    """The record's string; empty if no column is named or its value is null."""
    if name is None or get_column(record, name) is None:
        return ""
    return get_text(record, name)


TYPE_NAMES: Mapping[type, str] = {
    **{type(None): "null", dict: "an object", list: "a list", bool: "a boolean"},
    **{int: "a number", float: "a number", str: "a string"},
}


def json_type_name(value: Any) -> str:
    """Name of a JSON value's type, with article."""
    return TYPE_NAMES.get(type(value), type(value).__name__)


def wrong_type(location: str, value: Any, meant: str) -> BadRecord:
    """Error for a value that is not what is `meant`, such as `a string`."""
    return BadRecord("wrong_type", f"{location} is {json_type_name(value)} where {meant} is meant")


def check_list(location: str, value: Any, meant: str = "a list") -> list[Any]:
    """Return `value`, which must be a list."""
    if not isinstance(value, list):
        raise wrong_type(location, value, meant)
    return value


def describe_value(value: Any) -> str:
    """Short description of a value: a number itself, a list with its length, else the type."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return str(value) if isinstance(value, int | float) else json_type_name(value)


@dataclass
class Tally:
    """Counts of a sequence of records; a function of their content."""

    records: int = 0
    rows: int = 0
    """Samples."""
    tokens: int = 0
    """Tokens of all samples; for pairs, of both sides."""
    trained_tokens: int = 0
    """Trained tokens. The first token of a sample is never trained: no position predicts it."""
    truncated: int = 0
    """Samples truncated to `max_seq_len`."""
    tokens_cut: int = 0
    """Tokens cut from them, including dropped turns."""
    turns_dropped: int = 0
    """Turns dropped from conversations to fit `max_seq_len`."""
    lengths: Counter[str] = field(default_factory=Counter)
    """Length histogram of samples (`rows.schema.histogram`); a pair has the length of its longer
    side."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Records without a sample, by reason."""
    causes: Counter[str] = field(default_factory=Counter)
    """Records without a sample, by cause (`normalize_reason`), up to `MAX_CAUSES`."""
    unread: Counter[str] = field(default_factory=Counter)
    """Records with a non-empty column that their format does not read, by column."""
    unread_examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The first record of each: file, line, record (as in `samples`), value (an excerpt)."""
    blank_answers: int = 0
    """Conversations with an empty trained answer: only its end token is trained."""
    assistant_first: int = 0
    """Conversations that start with an assistant message."""
    without_end: int = 0
    """Conversations with a trained turn that no token ends."""
    repeated_bos: int = 0
    """Texts that begin with the BOS token that the tokenizer adds."""
    images: int = 0
    """Images of all samples."""
    weighted: int = 0
    """Samples of slices in which some loss weight is not 1."""
    media: list[str] = field(default_factory=list)
    """Files with these images, below the slice cache's `media` folder, without suffix; empty for
    data without images."""
    lacking: list[str] = field(default_factory=list)
    """Extras of this package that were not installed, for which records were left out."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Examples of each cause: file, line, record (if lines do not identify records), reason (a
    word), why (a sentence)."""

    @property
    def bad(self) -> int:
        """Number of unusable records, without those dropped for `DROP_REASONS`."""
        return sum(count for reason, count in self.left_out.items() if reason not in DROP_REASONS)

    def drop_record(
        self, file: str, line: int, fault: BadRecord, record: int | None = None
    ) -> None:
        """Count a record without a sample. `record`: its number, if lines do not identify it."""
        self.left_out[fault.reason] += 1
        cause = normalize_reason(fault.reason, fault.why)
        if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
            cause = OTHER
        self.causes[cause] += 1
        if self.causes[cause] <= EXAMPLES_PER_CAUSE and len(self.samples) < MAX_EXAMPLES:
            location = locate(file, line, record)
            self.samples.append({**location, "reason": fault.reason, "why": fault.why})

    def as_json(self) -> dict[str, Any]:
        """As plain JSON, read by `from_json`."""
        record = {name: getattr(self, name) for name in _COUNTS}
        record |= {name: dict(sorted(getattr(self, name).items())) for name in _COUNTERS}
        record["samples"] = self.samples
        for name in ("unread_examples", "lacking", "weighted"):
            record |= {name: value} if (value := getattr(self, name)) else {}
        return {**record, "images": self.images, "media": self.media} if self.media else record

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Tally":
        """Build from the output of `as_json`."""
        counters = {name: Counter(value.get(name, {})) for name in _COUNTERS}
        return cls(**{**value, **counters})

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        """Sum of several tallies."""
        total = cls()
        for tally in tallies:
            for name in (*_COUNTS, *_COUNTERS, "images", "weighted", "media", "samples"):
                setattr(total, name, getattr(total, name) + getattr(tally, name))
            total.unread_examples = {**tally.unread_examples, **total.unread_examples}
            total.lacking = sorted({*total.lacking, *tally.lacking})
        # Each slice has its own examples of a cause, so the limits are applied to all of them
        # again.
        counts: Counter[str] = Counter()
        samples, total.samples = total.samples, []
        for sample in samples:
            cause = normalize_reason(sample["reason"], sample["why"])
            counts[cause] += 1
            if counts[cause] <= EXAMPLES_PER_CAUSE and len(total.samples) < MAX_EXAMPLES:
                total.samples.append(sample)
        return total


def locate(file: str, line: int, record: int | None) -> dict[str, Any]:
    """Location of a record, for `record_location`. `record`: its number, if lines do not identify
    it."""
    return {"file": file, "line": line, **({} if record is None else {"record": record})}


def normalize_reason(reason: str, why: str) -> str:
    """A cause: reason and message with numbers replaced by #."""
    return f"{reason}: {re.sub(_NUMBER, '#', why)}"


_NUMBER = re.compile(r"\d+")
_COUNTERS = ("lengths", "left_out", "causes", "unread")
_LISTS = (*_COUNTERS, "unread_examples", "images", "weighted", "media", "lacking", "samples")
_COUNTS = tuple(f.name for f in fields(Tally) if f.name not in _LISTS)


def format_causes(samples: Sequence[Mapping[str, Any]], causes: Mapping[str, int]) -> str:
    """One line per cause, most frequent first: count, message, example records."""
    by_cause: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_cause.setdefault(normalize_reason(sample["reason"], sample["why"]), []).append(sample)
    lines: list[str] = []
    for cause, cause_examples in sorted(by_cause.items(), key=lambda item: -causes.get(item[0], 0)):
        count, first = causes.get(cause, len(cause_examples)), cause_examples[0]
        if count == 1:
            lines.append(f"    {record_location(first)}: {first['why']}")
            continue
        more = ", …" if count > len(cause_examples) else ""
        locations = ", ".join(map(record_location, cause_examples))
        if "record" in first and len({sample["file"] for sample in cause_examples}) == 1:
            numbers = ", ".join(str(sample.get("record")) for sample in cause_examples)
            plural = "s" * (len(cause_examples) > 1)
            locations = f"{first['file']}, record{plural} {numbers}"
        lines.append(f"    {count} x {first['why']} ({locations}{more})")
    return "\n".join(lines[:MAX_CAUSES_SHOWN])


def record_location(sample: Mapping[str, Any]) -> str:
    """`file:line`, or the record number in a file without lines."""
    if "record" in sample:
        file = f"{sample['file']}, " if sample["file"] else ""
        return f"{file}record {sample['record']}"
    return f"{sample['file']}:{sample['line']}"
