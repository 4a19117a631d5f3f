"""Which answers are trained, as a list of 0 and 1 beside them says."""

from typing import Any

from penstock.prepare.bad_records import BadRecord, describe_value


def parse_labels(where: str, value: Any, count: int, why: str) -> list[bool]:
    """The `count` labels in the list `value`. `why` says what makes it that many.

    Raises BadRecord for a list of another length and for entries that are neither 0 nor 1.
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
