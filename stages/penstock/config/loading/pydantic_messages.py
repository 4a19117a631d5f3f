"""Error messages for pydantic's validation errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from penstock.config.loading import yaml12
from penstock.config.loading.fault import Steps, shown
from penstock.config.loading.schema_tree import (
    annotation_at,
    branches,
    describe_type,
    example,
    field_at,
    is_section,
    sections,
)
from penstock.config.loading.suggest_name import suggest
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.registered import UNREGISTERED
from penstock.config.schema.run import RunConfig

Detail = Mapping[str, Any]

LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}

# Settings in which a user may have written a secret, which must not be repeated.
SECRET = frozenset({"hf_use_auth_token"})

# What settings take besides their choices.
PATTERN_EXAMPLES: Mapping[str, str] = {
    "optimizer": "the full name of another, such as torch.optim.RAdam",
    "worker_bind_address": "tcp://host:port",
}

# Other tools' names of our choices.
CHOICE_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "float16", "16-mixed"), "fp16_mixed"),
    **dict.fromkeys(("bfloat16", "bf16-true"), "bf16"),
    **dict.fromkeys(("amp", "bf16-mixed"), "bf16_mixed"),
    **dict.fromkeys(("float32", "32", "32-true"), "fp32"),
    **dict.fromkeys(("flash", "flash_attn", "flash_attention", "fa2"), "flash_attention_2"),
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "ipo", "cpo"), "preference"),
    **dict.fromkeys(("pt", "cpt"), "pretrain"),
    "cosine_with_restarts": "cosine",
    "gpu": "auto",
}

# Stages of other tools, which are `train.objective` here.
FOREIGN_STAGES = ("sft", "dpo", "kto", "pt", "rm", "ppo")

YES_AND_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@dataclass(frozen=True)
class _Place:
    path: Steps
    annotation: Any
    default: Any

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def kinds(self) -> tuple[Any, ...]:
        return branches(self.annotation)

    @property
    def choices(self) -> list[Any]:
        literals = [kind for kind in self.kinds if get_origin(kind) is Literal]
        return [choice for kind in literals for choice in get_args(kind)]

    @property
    def type_text(self) -> str:
        return describe_type(self.annotation)

    @property
    def example(self) -> str:
        return example(self.annotation, self.default, self.name)


def error_message(
    path: Steps, details: Sequence[Detail], root: type[ConfigSection] = RunConfig
) -> str:
    """One message for all of pydantic's errors at `path`, from the class `root`."""
    limits = [detail for detail in details if detail["type"] in LIMITS]
    first = limits[0] if limits else details[0]
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown(path, first["input"], root)
    if kind == "invalid_key":
        return f"{first['input']!r} is not a name of a setting; names are text"
    location = _place(path, root)
    if kind == "missing":
        return f"required; for example {location.name}: {location.example}"
    for detail in details:
        if detail["type"] == UNREGISTERED:
            return _unregistered(location, detail)
    if kind == "value_error":
        # pydantic's own `msg` begins with "Value error, ".
        return str(first["ctx"]["error"])
    if limits:
        return _limit(location, first)
    if kind in ("too_short", "string_too_short"):
        return f"is empty; write at least one, for example {location.example}"
    if kind == "finite_number":
        return f"is {first['input']}; write a finite number"
    if any(detail["type"] == "string_pattern_mismatch" for detail in details):
        return _no_choice(location, str(first["input"]))
    return _wrong_type(location, first["input"])


def _place(path: Steps, root: type[ConfigSection]) -> _Place:
    field = field_at(path, root)
    default = None
    if field and not field.is_required():
        default = field.get_default(call_default_factory=True)
    return _Place(path, annotation_at(path, root), default)


def _no_choice(location: _Place, value: str) -> str:
    # For a setting that takes some names, and text that matches a pattern.
    choices = location.choices or [location.default]
    near = get_close_matches(value, choices, 1)
    meant = f"did you mean {near[0]}? It takes" if near else "write"
    return f"is {shown(value)}; {meant} {', '.join(choices)}, or {PATTERN_EXAMPLES[location.name]}"


def _unregistered(location: _Place, detail: Detail) -> str:
    # For a name that no part has: as for a choice among the names of all parts.
    names = Literal[tuple(detail["ctx"]["names"])]  # pyright: ignore[reportInvalidTypeForm]
    if location.name in PATTERN_EXAMPLES:
        return _no_choice(replace(location, annotation=names), str(detail["input"]))
    return _wrong_type(replace(location, annotation=names), detail["input"])


def _unknown(path: Steps, value: Any, root: type[ConfigSection]) -> str:
    sectioned = any(is_section(field.annotation) for field in root.model_fields.values())
    top = sectioned and len(path) == 1
    if top and path[0] == "server":
        return "is a section of the files of penstock serve; a run has none"
    problem = "unknown section" if top and isinstance(value, dict | None) else "unknown field"
    near = suggest(path, root)
    if near:
        section, _, name = near.rpartition(".")
        below = f" It belongs in {section}:" if top and section and name == path[-1] else ""
        return f"{problem}; did you mean {near}?{below}"
    if top:
        names = [name for name in sections() if "." not in name]
        return f"{problem}; the sections are {', '.join(names)}"
    return f"{problem}; configs/{'REFERENCE' if sectioned else 'SERVER'}.md lists all fields"


def _limit(location: _Place, detail: Detail) -> str:
    name, limit = LIMITS[detail["type"]]
    bound = detail["ctx"][name]
    number = f"{bound:g}" if isinstance(bound, float) else str(bound)
    if detail["type"] == "greater_than" and bound == 0 and int in location.kinds:
        limit, number = "at least", "1"
    return f"is {shown(detail['input'])}; it must be {limit} {number}"


def _wrong_type(location: _Place, value: Any) -> str:
    if location.path[-1] in SECRET and isinstance(value, str):
        return f"is text; write {location.type_text} (a secret belongs in the environment)"
    text = "" if value is None or isinstance(value, list | dict) else shown(value)
    problem = f"is {_noun(value)}{text}"
    if any(map(is_section, location.kinds)):
        return f"{problem}; wanted a mapping of settings, for example {location.example}"
    if isinstance(value, str) and location.choices and str not in location.kinds:
        meant = CHOICE_ALIASES.get(value.lower())
        near = [meant] if meant in location.choices else []
        near = near or get_close_matches(value, map(str, location.choices), 1)
        if value.lower() in FOREIGN_STAGES and "train" in location.choices:
            return f"{problem}; write train, and set train.objective"
        if near:
            return f"{problem}; did you mean {near[0]}? It takes {location.type_text}"
        return f"{problem}; write {location.type_text}"
    return f"{problem}; wanted {location.type_text}: {_instead(location, value)}"


def _instead(location: _Place, value: Any) -> str:
    # What to write, derived from the wrong value where possible.
    kinds = location.kinds
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
    return f"for example {location.example}"


def _noun(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return "the text " if isinstance(value, str) else ""
