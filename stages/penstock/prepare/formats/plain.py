"""`text`: documents trained whole."""

from penstock.prepare.bad_records import BadRow, checked_text, column, json_type_name
from penstock.prepare.formats.sample import Record, Text
from penstock.prepare.settings import DatasetSettings


def plain(settings: DatasetSettings, record: Record) -> Text:
    """The text in the column `field_text`, or the texts in it, one right after another."""
    name = settings.field_text
    value = column(record, name)
    if isinstance(value, list):
        value = "".join(checked_text(f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, str):
        checked_text(name, value)
    else:
        why = f"{name} is {json_type_name(value)} where a string or a list of strings is meant"
        raise BadRow("wrong_type", why)
    if not value or value.isspace():
        raise BadRow("empty", f"{name} is empty")
    return Text(value)
