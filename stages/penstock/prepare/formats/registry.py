"""Table of formats by name."""

from collections.abc import Sequence

from penstock.config.schema.dataset import FormatName
from penstock.prepare.bad_records import BadRecord, check_weight, get_column
from penstock.prepare.formats.alpaca import alpaca
from penstock.prepare.formats.chat import chat
from penstock.prepare.formats.conversation import Format, Parsed, Record
from penstock.prepare.formats.erniekit import preference_turns, sft_turns
from penstock.prepare.formats.instruction import instruction
from penstock.prepare.formats.kto import kto
from penstock.prepare.formats.plain import plain
from penstock.prepare.formats.preference import preference
from penstock.prepare.formats.sharegpt import sharegpt
from penstock.prepare.formats.template_kwargs import with_template_kwargs
from penstock.prepare.formats.tokenized import tokenized
from penstock.prepare.settings import DatasetSettings

FORMATS: dict[FormatName, Format] = {
    "tokenized": tokenized,
    "chat": chat,
    "sharegpt": sharegpt,
    "instruction": instruction,
    "alpaca": alpaca,
    "text": plain,
    "preference": preference,
    "kto": kto,
    "sft_turns": sft_turns,
    "preference_turns": preference_turns,
}


def parse_record(
    settings: DatasetSettings, value: Record | BadRecord, columns: Sequence[str] | None
) -> Parsed:
    """Parse a record, of which only `columns` are used if they are given. Raises BadRecord."""
    if isinstance(value, BadRecord):
        raise value
    if columns is not None:
        value = {name: get_column(value, name) for name in columns}
    return with_template_kwargs(FORMATS[settings.type](settings, value), value)


def parse_weight(settings: DatasetSettings, value: Record | BadRecord) -> float:
    """The record's loss weight: 1 if no column is named or its value is null.

    Raises BadRecord for a record that weighs 0, of which nothing is trained.
    """
    name = settings.field_weight
    if name is None or isinstance(value, BadRecord):
        return 1.0
    value_of_column = get_column(value, name)
    weight = 1.0 if value_of_column is None else check_weight(name, value_of_column)
    if not weight:
        raise BadRecord("no_trained_tokens", f"its {name} is 0")
    return weight
