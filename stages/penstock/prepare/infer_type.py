"""Infer the format of a data set from its first records.

`infer_format` is a pure function of the records and of the columns that the configuration names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from penstock.config.schema.dataset import FormatName
from penstock.core.cache.stage import Source
from penstock.core.errors import ConfigError, StageError
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.dataset_type import INFER_RECORDS, InferredType
from penstock.prepare.formats.json_values import parse_json_text
from penstock.prepare.formats.kto import parse_kto_label
from penstock.prepare.readers.file_splits import FileSplit, split_source
from penstock.prepare.readers.records import Value
from penstock.prepare.readers.registry import read_chunks

MESSAGE_COLUMNS = ("messages", "conversations")
"""Columns with conversations."""

MESSAGE_KEYS = ("field_message_role", "field_message_content")
"""Settings that name the keys of messages."""

PREFERRED_TYPES: Mapping[str, set[FormatName]] = {
    "preference": {"preference", "preference_turns", "kto"},
    "pretrain": {"text"},
}
"""Types that an objective can train on; other objectives accept all types."""

QUESTIONS = ("instruction", "prompt", "question", "query", "input", "problem")
CONTEXTS = ("context", "input")
ANSWERS = ("completion", "response", "answer", "output", "solution")
TEXTS = ("text", "content", "document", "body")
"""Column names for suggestions in errors; they are not used for inference."""


def read_first(
    source: Source, ds_type: str | None, token: bool | None, max_record_bytes: int
) -> list[dict[str, Any]]:
    """Up to `INFER_RECORDS` records from the start of a source.

    Raises as the readers do, and StageError if none of the records can be read.
    """
    values = read_first_values(source, ds_type, token, max_record_bytes)
    return [value for value in values if not isinstance(value, BadRecord)]


def read_first_values(
    source: Source, ds_type: str | None, token: bool | None, max_record_bytes: int
) -> list[Value]:
    """The records of `read_first`, and those that cannot be read. Raises as it does."""
    if source.pin["kind"] == "hub":
        # `datasets` takes a second to import.
        from penstock.prepare.readers.hub import first_rows  # noqa: PLC0415

        return list(first_rows(source.pin, INFER_RECORDS, token))
    values = _first_values(
        split_source(
            source, ds_type=ds_type, streaming=False, token=token, max_record_bytes=max_record_bytes
        ),
        token,
    )
    first = next((value for value in values if isinstance(value, BadRecord)), None)
    if first and all(isinstance(value, BadRecord) for value in values):
        raise StageError(f"none of the first {len(values)} records can be read: {first.why}")
    return values


def infer_from_splits(pieces: Sequence[FileSplit]) -> InferredType | None:
    """Infer the format from the first records of a file split; None if none or several fit."""
    values = _first_values(pieces[:1], None)
    records = [value for value in values if not isinstance(value, BadRecord)]
    try:
        return infer_format(records, {}, objective="", location="")
    except ConfigError:
        return None


def infer_format(
    records: Sequence[Mapping[str, Any]],
    named: Mapping[str, str],
    *,
    objective: str,
    location: str,
) -> InferredType:
    """Infer the format of the records. `named` are the `field_` settings that the user has set; of
    several formats, those that `objective` (`train.objective`) can train on are preferred.

    Raises ConfigError if no format or several fit.
    """
    columns = _columns(records)
    candidates = list(_candidates(columns, named))
    formats = {candidate.type for candidate in candidates}
    if "tokenized" in formats:
        candidates = [candidate for candidate in candidates if candidate.type == "tokenized"]
    elif first := formats & PREFERRED_TYPES.get(objective, set()):
        candidates = [candidate for candidate in candidates if candidate.type in first]
    if len(candidates) == 1:
        return candidates[0]
    have = ", ".join(columns) or "no columns"
    if candidates:
        remedies = ", or ".join(f"type: {candidate.type}" for candidate in candidates)
        raise ConfigError(
            f"{location}.type is not written, and its records fit {len(candidates)} types; they "
            f"have {have}.\n  Write {remedies}."
        )
    raise ConfigError(
        f"{location}.type is not written, and no type fits its records; they have {have}.\n"
        f"  {suggest_fields(columns)}"
    )


def suggest_fields(columns: Mapping[str, Any]) -> str:
    """Suggest settings for records with these columns."""
    lists = [name for name, value in columns.items() if _messages_type(name, value)]
    question, answer = (
        next((name for name in lists if name in usual), None) for usual in (QUESTIONS, ANSWERS)
    )
    if question and answer:
        return (
            f"Join the messages of {question} and {answer} in one column, messages, and write "
            "type: chat."
        )
    likely = _likely_settings(columns)
    as_text = any(_is_text(columns.get(name)) for name in MESSAGE_COLUMNS)
    if as_text and (likely is None or likely.type == "text"):
        return (
            'A conversation is a list of messages, such as [{"role": "user", "content": "…"}, …]; '
            "write it so, or name the column of plain text (type: text, field_text: …)."
        )
    if likely:
        fields = (f"{name}: {value}" for name, value in likely.settings().items())
        return f"Write {', '.join(fields)}."
    return (
        "Write type: chat, sharegpt, alpaca, instruction, text, preference, kto or tokenized, and "
        "with field_… which columns to read (docs/guide/own-data.md). The first line of a CSV file "
        "names its columns."
    )


def _likely_settings(columns: Mapping[str, Any]) -> InferredType | None:
    """The format that columns with usual names may be meant for, though it is not certain."""
    if lists := [name for name, value in columns.items() if _messages_type(name, value)]:
        kind = _messages_type(lists[0], columns[lists[0]])
        assert kind
        return InferredType(kind, {"field_messages": lists[0]}, lists[0])
    question = next((name for name in QUESTIONS if _is_text(columns.get(name))), None)
    answer = next((n for n in ANSWERS if _is_text(columns.get(n)) and n != question), None)
    if question and answer:
        used = (question, answer)
        context = next((n for n in CONTEXTS if _is_text(columns.get(n)) and n not in used), None)
        more = {"field_input": context} if context else {}
        fields = {"field_instruction": question, **more, "field_output": answer}
        return InferredType("instruction", fields, " and ".join(used))
    texts = [name for name, value in columns.items() if _is_text(value)]
    usual = next((name for name in TEXTS if name in texts), None)
    if usual or len(texts) == 1:
        name = usual or texts[0]
        return InferredType("text", {"field_text": name}, name)
    return None


def guess_format(records: Sequence[Mapping[str, Any]]) -> tuple[InferredType, bool]:
    """The format of the records, and whether it is certain.

    Of several that fit, the one that keeps most of a record's structure. Of columns with unusual
    names, the two with the longest texts are a question and an answer. Raises ConfigError if there
    is no text.
    """
    columns = _columns(records)
    fitting = list(_candidates(columns, {}))
    if fitting:
        return fitting[0], len(fitting) == 1
    if likely := _likely_settings(columns):
        return likely, False
    sizes = {
        name: sum(len(str(record.get(name) or "")) for record in records)
        for name, value in columns.items()
        if _is_text(value)
    }
    longest = sorted(sizes, key=lambda name: -sizes[name])[:2]
    if len(longest) < 2:
        have = ", ".join(columns) or "no columns"
        raise ConfigError(
            f"no type fits the records; they have {have}.\n  {suggest_fields(columns)}"
        )
    question, answer = (name for name in columns if name in longest)
    fields = {"field_instruction": question, "field_output": answer}
    return InferredType("instruction", fields, f"{question} and {answer}"), False


def _candidates(columns: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[InferredType]:
    def has(*names: str) -> bool:
        return all(name in columns for name in names)

    if has("input_ids"):
        yield InferredType("tokenized", columns="input_ids")
    chosen, rejected = (named.get(f"field_{n}", n) for n in ("chosen", "rejected"))
    if has(chosen, rejected):
        yield InferredType("preference", columns=f"{chosen} and {rejected}")
    elif has("rejected_response"):
        yield InferredType("preference", columns="rejected_response")
    prompt, completion, label = (
        named.get(f"field_{n}", n) for n in ("prompt", "completion", "label")
    )
    is_judged = has(prompt, completion) and parse_kto_label(columns.get(label)) is not None
    if is_judged:
        yield InferredType("kto", columns=f"{prompt}, {completion} and {label}")
    if has("src", "tgt"):
        kind: FormatName = "preference_turns" if has("response") else "sft_turns"
        yield InferredType(kind, columns="src and tgt")
    elif has("text_info"):
        yield InferredType("sft_turns", columns="text_info")
    yield from _conversation_types(columns, named)
    question, answer = (named.get(f"field_{n}", n) for n in ("instruction", "output"))
    if has(question, answer):
        yield InferredType("alpaca", columns=f"{question} and {answer}")
    elif has("prompt", "completion") and not is_judged and not has("messages"):
        texts = all(_is_text(columns[name]) for name in ("prompt", "completion"))
        if texts and not {"field_instruction", "field_output"} & named.keys():
            fields = {"field_instruction": "prompt", "field_output": "completion"}
            yield InferredType("instruction", fields, "prompt and completion")
    text = named.get("field_text", "text")
    if has(text):
        yield InferredType("text", columns=text)


def _conversation_types(
    columns: Mapping[str, Any], named: Mapping[str, str]
) -> Iterator[InferredType]:
    own = named.get("field_messages")
    keys = tuple(named[name] for name in MESSAGE_KEYS if name in named)
    for name in [own] if own else MESSAGE_COLUMNS:
        spelling = _messages_type(name, columns.get(name), keys) if name in columns else None
        if spelling is None:
            continue
        usual = "messages" if spelling == "chat" else "conversations"
        fields = {} if own or name == usual else {"field_messages": name}
        key_names = "role and content" if spelling == "chat" else "from and value"
        key_names = " and ".join(keys) or key_names
        yield InferredType(spelling, fields, f"{name} with {key_names}")
        return


def _messages_type(location: str, value: Any, keys: Sequence[str] = ()) -> FormatName | None:
    """Format of a list of messages, "chat" or "sharegpt"; "chat" if they have the `keys` that are
    named; None for any other value."""
    messages = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            messages = parse_json_text(location, value)
        except BadRecord:
            return None
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], Mapping):
        return None
    first: Mapping[str, Any] = messages[0]
    if keys:
        return "chat" if all(key in first for key in keys) else None
    if "from" in first and "value" in first:
        return "sharegpt"
    return "chat" if "role" in first else None


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All columns of the records, each with its first value that is neither null nor empty."""
    columns: dict[str, Any] = {}
    for record in records:
        for name, value in record.items():
            # Not `not value`: an array of token ids has no truth value.
            earlier = columns.get(name)
            if earlier is None or (isinstance(earlier, str | list) and not earlier):
                columns[name] = value
    return columns


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _first_values(pieces: Iterable[FileSplit], token: bool | None) -> list[Value]:
    values = (
        value
        for piece in pieces
        for chunk in read_chunks(piece, token)
        for value in chunk.part(0, INFER_RECORDS).values()
    )
    return list(islice(values, INFER_RECORDS))
