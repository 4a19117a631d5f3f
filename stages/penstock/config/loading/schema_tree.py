"""Walking the schema: the type of a setting by its path, and examples."""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from penstock.config.loading.fault import Steps, shown
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
PLURALS: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}
EXAMPLES: Mapping[Any, Any] = {bool: True, int: 8, float: 0.5, str: "name"}
REQUIRED_EXAMPLES: Mapping[str, str] = {
    "datasets": "[{path: data/train.jsonl}]",
    "model_path": "Qwen/Qwen3-8B",
    "output_dir": "outputs/my-run",
    "path": "data/train.jsonl",
}


def branches(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone. `Annotated` is removed."""
    if get_origin(annotation) is Annotated:
        return branches(get_args(annotation)[0])
    # `int | None` is a UnionType; a union with `Annotated` or a Literal in it may be a Union.
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for branch in get_args(annotation) for inner in branches(branch))
    return (annotation,)


def is_section(annotation: Any) -> bool:
    """Whether the annotation is a class of settings."""
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)


def child_annotation(annotation: Any, step: str | int) -> Any:
    """The annotation of the child `step` of a value of this type; None if there is none."""
    for branch in branches(annotation):
        if is_section(branch) and step in branch.model_fields:
            return branch.model_fields[str(step)].annotation
        if get_origin(branch) is list and isinstance(step, int):
            return get_args(branch)[0]
        if get_origin(branch) is dict and isinstance(step, str):
            return get_args(branch)[1]
    return None


def annotation_at(path: Steps, root: type[ConfigSection] = RunConfig) -> Any:
    """The annotation of the setting at `path`; None if there is none."""
    annotation: Any = root
    for step in path:
        annotation = child_annotation(annotation, step)
        if annotation is None:
            return None
    return annotation


def field_at(path: Steps, root: type[ConfigSection] = RunConfig) -> FieldInfo | None:
    """The field at `path`; None for entries of lists and mappings."""
    section = annotation_at(path[:-1], root)
    for branch in branches(section):
        if path and is_section(branch):
            return branch.model_fields.get(str(path[-1]))
    return None


def enclosing_field(path: Steps, root: type[ConfigSection] = RunConfig) -> Steps:
    """The longest prefix of `path` that is a field, or an entry of a list of sections: the smallest
    part that can be removed or replaced."""
    for length in range(len(path), 0, -1):
        part = path[:length]
        if field_at(part, root) or any(map(is_section, branches(annotation_at(part, root)))):
            return part
    return ()


def describe_type(annotation: Any) -> str:
    """The values of this type, in words."""
    type_names = list(
        dict.fromkeys(type_name for branch in branches(annotation) for type_name in _words(branch))
    )
    *first_names, last = type_names
    if not first_names:
        return last
    comma = "," if any(" or " in type_name for type_name in type_names) else ""
    return f"{', '.join(first_names)}{comma} or {last}"


def _words(branch: Any) -> tuple[str, ...]:
    if branch is bool:
        return ("true", "false")
    if branch in WORDS:
        return (WORDS[branch],)
    if get_origin(branch) is Literal:
        return tuple(shown(value) for value in get_args(branch))
    if get_origin(branch) is list:
        inner = get_args(branch)[0]
        if is_section(inner):
            return ("a list of mappings",)
        return (f"a list of {PLURALS.get(inner) or describe_type(inner)}",)
    return ("a mapping",)


def example(annotation: Any, default: Any = None, name: str = "") -> str:
    """An example value for the setting `name` of this type, in YAML."""
    if name in REQUIRED_EXAMPLES:
        return REQUIRED_EXAMPLES[name]
    if default not in (None, [], {}) and not isinstance(default, ConfigSection):
        return shown(default)
    return _example(branches(annotation)[0])


def _example(branch: Any) -> str:
    if branch in EXAMPLES:
        return shown(EXAMPLES[branch])
    if get_origin(branch) is Literal:
        return shown(get_args(branch)[0])
    if get_origin(branch) is list:
        return f"[{_example(branches(get_args(branch)[0])[0])}]"
    if is_section(branch):
        required = [name for name, field in branch.model_fields.items() if field.is_required()]
        name = (required or list(branch.model_fields))[0]
        return f"{{{name}: {example(branch.model_fields[name].annotation, name=name)}}}"
    return "{name: value}"


@cache
def sections() -> Mapping[str, type[ConfigSection]]:
    """Every class of settings by its first path: `model`, `data`, `data.datasets[]`,
    `model.encoders{}`, ..."""
    by_name: dict[str, type[ConfigSection]] = {}
    for name, section in _sections(RunConfig, ""):
        if section not in by_name.values():
            by_name[name] = section
    return by_name


def _sections(section: type[ConfigSection], name: str) -> Iterator[tuple[str, type[ConfigSection]]]:
    if name:
        yield name, section
    for field_name, field in section.model_fields.items():
        field_path = f"{name}.{field_name}" if name else field_name
        for branch in branches(field.annotation):
            if is_section(branch):
                yield from _sections(branch, field_path)
            elif get_origin(branch) is list and is_section(get_args(branch)[0]):
                yield from _sections(get_args(branch)[0], f"{field_path}[]")
            elif get_origin(branch) is dict and is_section(get_args(branch)[1]):
                yield from _sections(get_args(branch)[1], f"{field_path}{{}}")
