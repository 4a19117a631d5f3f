"""What checkpoints are called: a text with places for the step and for the rows until then."""

import re
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator

GLOBAL_STEP = "global_step_{step}"
"""What they are called where nothing else is written."""

_FIELDS = ("step", "consumed_samples")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", re.ASCII)


def _names_a_folder(template: str) -> str:
    """Raises ValueError for what names no folder of its own for every step."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is no template: {error}; write {GLOBAL_STEP}") from None
    fields = [field for _, field, _, _ in parts if field is not None]
    is_plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    if (
        not is_plain
        or fields.count("step") != 1
        or sorted(fields) != sorted({*fields} & {*_FIELDS})
    ):
        raise ValueError(
            "has to hold {step} once, and may hold {consumed_samples} once, and no other; write"
            f" {GLOBAL_STEP}"
        )
    if len(fields) > 1 and not re.search(r"\D", parts[1][0]):
        raise ValueError("lets two numbers run together; write something between them")
    name = template.format(step=1, consumed_samples=1)
    if not _FOLDER.fullmatch(name) or name.endswith(".part"):
        raise ValueError(
            "is to be the name of a folder: letters, digits and . _ = + - alone, with a letter or a"
            " digit first, and not .part at the end"
        )
    if template != GLOBAL_STEP and step_in(GLOBAL_STEP, name) is not None:
        raise ValueError(f"looks like {GLOBAL_STEP}, and another number follows; write that")
    return template


CheckpointName = Annotated[str, AfterValidator(_names_a_folder)]


def step_in(template: str, name: str) -> int | None:
    """The step that a name made of the template tells; None if it is no such name."""
    pattern = ""
    for text, field, _, _ in Formatter().parse(template):
        number = r"(\d+)" if field == "step" else r"\d+"
        pattern += re.escape(text) + (number if field else "")
    found = re.fullmatch(pattern, name, re.ASCII)
    return int(found[1]) if found else None
