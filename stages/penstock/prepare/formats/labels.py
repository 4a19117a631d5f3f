"""Which answers are trained, as a list of 0 and 1 beside them says."""

from typing import Any

from penstock.prepare.bad_records import BadRow, sized


def labels_in(where: str, value: Any, count: int, why: str) -> list[bool]:
    """The `count` labels in the list `value`. `why` says what makes it that many.

    Raises BadRow for a list of another length and for entries that are neither 0 nor 1.
    """
    if not isinstance(value, list) or len(value) != count:
        raise BadRow(
            "bad_value", f"{where} is {sized(value)} where a list of {count} is meant, {why}"
        )
    for index, label in enumerate(value):
        if not isinstance(label, int) or label not in (0, 1):
            raise BadRow("bad_value", f"{where}[{index}] is {sized(label)} where 0 or 1 is meant")
    return [bool(label) for label in value]
