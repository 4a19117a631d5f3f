"""`text`: documents; all tokens are trained."""

from penstock.prepare.bad_records import BadRecord, check_text, get_column, json_type_name
from penstock.prepare.formats.conversation import Record, Text
from penstock.prepare.settings import DatasetSettings


def plain(settings: DatasetSettings, record: Record) -> Text:
    """The text in `field_text`; a list of texts is concatenated."""
    name = settings.field_text
    value = get_column(record, name)
    if isinstance(value, list):
        value = "".join(check_text(f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, str):
        check_text(name, value)
    else:
        why = f"{name} is {json_type_name(value)} where a string or a list of strings is meant"
        raise BadRecord("wrong_type", why)
    if not value or value.isspace():
        raise BadRecord("empty", f"{name} is empty")
    return Text(value)
