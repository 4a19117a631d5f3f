"""Parse lists of 0 and 1 that say which assistant messages are trained."""

from typing import Any

from penstock.prepare.bad_records import BadRecord, describe_value


def parse_labels(where: str, value: Any, count: int, why: str) -> list[bool]:
    """Parse a list of `count` labels; `why` explains the count in the error.

    Raises BadRecord for another length and for entries other than 0 and 1.
    """
    if not isinstance(value, list) or len(value) != count:
        raise BadRecord(
            "bad_value",
            f"{where} is {describe_value(value)} where a list of {count} is meant, {why}",
        )
    for index, label in enumerate(value):
        if not isinstance(label, int) or label not in (0, 1):
            raise BadRecord(
                "bad_value", f"{where}[{index}] is {describe_value(label)} where 0 or 1 is meant"
            )
    return [bool(label) for label in value]
