"""What pydantic found, in the words of the people who write configurations."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from penstock.config import yaml12
from penstock.config.faults import Steps, shown
from penstock.config.shape import (
    annotation_at,
    branches,
    example,
    field_at,
    is_section,
    sections,
    suggestion,
    wanted,
)

Detail = Mapping[str, Any]

LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
SECRET = frozenset({"hf_use_auth_token"})
"""Settings in whose place a person may have written a secret, which is not to be repeated."""

OF_A_FORM: Mapping[str, str] = {
    "optimizer": "the full name of another, such as torch.optim.RAdam",
}
"""What settings take besides their choices."""

YES_AND_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def sentence(path: Steps, details: Sequence[Detail]) -> str:
    """One sentence for all that was found at `path`."""
    limits = [detail for detail in details if detail["type"] in LIMITS]
    first = limits[0] if limits else details[0]
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown(path, first["input"])
    if kind == "invalid_key":
        return f"{first['input']!r} is no name of a setting; names are text"
    if kind == "missing":
        return f"required; for example {path[-1]}: {_example_at(path)}"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if limits:
        return _limit(path, first)
    if kind in ("too_short", "string_too_short"):
        return f"is empty; write at least one, for example {_example_at(path)}"
    if kind == "finite_number":
        return f"is {first['input']}; write a finite number"
    if any(detail["type"] == "string_pattern_mismatch" for detail in details):
        return _no_choice(path, str(first["input"]))
    return _wrong_type(path, first["input"])


def _no_choice(path: Steps, value: str) -> str:
    """Of a setting that takes some names, and texts of a form."""
    choices = [
        one for kind in _kinds(path) if get_origin(kind) is Literal for one in get_args(kind)
    ]
    near = get_close_matches(value, choices, 1)
    meant = f"did you mean {near[0]}? It takes" if near else "write"
    return f"is {shown(value)}; {meant} {', '.join(choices)}, or {OF_A_FORM[str(path[-1])]}"


def _unknown(path: Steps, value: Any) -> str:
    top = len(path) == 1
    what = "unknown section" if top and isinstance(value, dict | None) else "unknown field"
    near = suggestion(path)
    if near:
        return f"{what}; did you mean {near}?"
    if top:
        names = [name for name in sections() if "." not in name]
        return f"{what}; the sections are {', '.join(names)}"
    return f"{what}; configs/REFERENCE.md lists those there are"


def _limit(path: Steps, detail: Detail) -> str:
    name, words = LIMITS[detail["type"]]
    bound = detail["ctx"][name]
    number = f"{bound:g}" if isinstance(bound, float) else str(bound)
    if detail["type"] == "greater_than" and bound == 0 and int in _kinds(path):
        words, number = "at least", "1"
    return f"is {shown(detail['input'])}; it must be {words} {number}"


def _kinds(path: Steps) -> tuple[Any, ...]:
    return branches(annotation_at(path))


def _example_at(path: Steps) -> str:
    field = field_at(path)
    annotation = annotation_at(path)
    default = field.default if field and not field.is_required() else None
    return example(annotation, default, str(path[-1]))


def _wrong_type(path: Steps, value: Any) -> str:
    kinds = _kinds(path)
    if path[-1] in SECRET and isinstance(value, str):
        return f"is text; write {wanted(annotation_at(path))} (a secret belongs in the environment)"
    found = f"is {_noun(value)}{_shown(value)}"
    if any(map(is_section, kinds)):
        return f"{found}; wanted a mapping of settings, for example {_example_at(path)}"
    words = wanted(annotation_at(path))
    choices = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    if isinstance(value, str) and choices and str not in kinds:
        near = get_close_matches(value, map(str, choices), 1)
        if near:
            return f"{found}; did you mean {near[0]}? It takes {words}"
        return f"{found}; write {words}"
    return f"{found}; wanted {words}: {_instead(path, kinds, value)}"


def _instead(path: Steps, kinds: tuple[Any, ...], value: Any) -> str:
    """What to write, made from what was written where that can be told."""
    if isinstance(value, str):
        if bool in kinds and value.lower() in YES_AND_NO:
            return f"write {YES_AND_NO[value.lower()]}, since YAML 1.2 reads {value} as text"
        if bool in kinds and value.lower() in ("true", "false"):
            return f"write {value.lower()} without quotes"
        number = yaml12.scalar(value)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and (float in kinds or (int in kinds and isinstance(number, int))):
            return f"write {value} without quotes"
        lists = [kind for kind in kinds if get_origin(kind) is list]
        if lists and get_args(lists[0])[0] is str:
            return f"write [{value}]"
        if any(value in get_args(branch) for kind in lists for branch in get_args(kind)):
            return f"write [{value}]"
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return f"write {int(value)}"
    if isinstance(value, bool | int | float) and str in kinds:
        return f'write it in quotes, "{shown(value)}"'
    return f"for example {_example_at(path)}"


def _noun(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return "the text " if isinstance(value, str) else ""


def _shown(value: Any) -> str:
    return "" if value is None or isinstance(value, list | dict) else shown(value)
