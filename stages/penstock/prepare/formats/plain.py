"""`text`: documents; all tokens are trained."""

from penstock.prepare.bad_records import BadRecord, check_text, get_column, wrong_type
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
        raise wrong_type(name, value, "a string or a list of strings")
    if not value or value.isspace():
        raise BadRecord("empty", f"{name} is empty")
    return Text(value)
