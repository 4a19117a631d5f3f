"""Generate the reference pages and JSON Schemas of all settings: of a run and of a server.

`python -m penstock.config.generate_docs [--check] [FOLDER]` writes the files to FOLDER
(`configs`), or with `--check` only reports which are stale (exit code 1).
"""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.config.loading.fault import shown
from penstock.config.loading.schema_tree import branches, is_section, sections
from penstock.config.rules.effect import describe
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import CacheKey, Role
from penstock.config.schema.effect import TRAINS, NativeOnly, conditions_of
from penstock.config.schema.run import RunConfig
from penstock.config.server.config import ServerConfig
from penstock.config.server.run_fields import SAME
from penstock.config.server.serving import ServerServing
from penstock.config.server.training import ServerModel, ServerTraining

PAGE, SCHEMA = "REFERENCE.md", "schema.json"
SERVER_PAGE, SERVER_SCHEMA = "SERVER.md", "server.schema.json"

HEAD = """\
# Config reference: every setting of a run

Every setting of a run, by section of its YAML file; each can also be given on the command line as
`--section.field value`. Paths are relative to the working directory. This page is generated from
the code by `python -m penstock.config.generate_docs`, and so is `schema.json`, with which an editor
completes and validates a file that begins with `# yaml-language-server: $schema=schema.json`.

For `model`, `train` and `lora` it says which settings are in the cache key of training. A run with
another value of one of these is trained again; with other values of the rest, its result is reused.
A setting that has an effect "only with" others is in no key without them.
"by content": the key has the content of the file or model that the setting names, or the sequences
of a step, and not the value itself.
"""

SERVER_HEAD = """\
# Config reference: every setting of a training server

Every setting of `penstock serve`, all at the top of its YAML file; each can also be given on the
command line as `--server.field value`. [docs/guide/server.md](../docs/guide/server.md) says how to
run a server. This page is generated from the code by `python -m penstock.config.generate_docs`, and
so is `server.schema.json`, with which an editor completes and validates a file that begins with
`# yaml-language-server: $schema=server.schema.json`.
"""

SERVER_PARTS: tuple[type[ConfigSection], ...] = (
    ServerModel,
    ServerTraining,
    ServerServing,
    ServerConfig,
)


def describe_fields(*models: type[BaseModel]) -> None:
    """Set `description` of every field that has none to the docstring beneath its declaration."""
    # Pydantic's `use_attribute_docstrings` would parse the sources whenever the schema is imported.
    for model in models:
        # Subclasses last: of a field that is declared again, their docstring counts.
        for base in reversed(model.__mro__):
            written = _module_docstrings(base.__module__).get(base.__qualname__, {})
            for name in written.keys() & model.model_fields.keys():
                model.model_fields[name].description = written[name]


@cache
def _module_docstrings(module: str) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a module without source, such as builtins
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {declared.name: dict(_attribute_docstrings(declared)) for declared in classes}


def _attribute_docstrings(declared: ast.ClassDef) -> list[tuple[str, str]]:
    pairs = zip(declared.body, declared.body[1:], strict=False)
    return [
        (field.target.id, inspect.cleandoc(text.value.value))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


def _describe_server_fields() -> None:
    # Copy the run's description to fields of a server that have no docstring of their own.
    for part in SERVER_PARTS:
        for name in part.model_fields.keys() & SAME.keys():
            section, _, run_name = SAME[name].rpartition(".")
            field, run_field = part.model_fields[name], sections()[section].model_fields[run_name]
            field.description = field.description or run_field.description


describe_fields(RunConfig, *sections().values(), *SERVER_PARTS)
_describe_server_fields()


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for name, section in sections().items():
        about = RunConfig.model_fields[name].description if "." not in name else section.__doc__
        entries = [
            _entry(f"{name}.{field_name}", section, field)
            for field_name, field in section.model_fields.items()
            if not is_section(field.annotation)
        ]
        parts.append("\n".join([f"## {name}\n\n{_line(about)}\n", *entries]))
    return "\n".join(parts)


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, draft 2020-12."""
    root = RunConfig.model_json_schema()
    classes = {section.__name__: section for section in sections().values()}
    for name, definition in {**root["$defs"], RunConfig.__name__: root}.items():
        definition.pop("title", None)
        definition["description"] = _line(definition.get("description"))
        fields = classes.get(name, RunConfig).model_fields
        for field_name, entry in definition["properties"].items():
            entry.pop("title", None)
            field = fields[field_name]
            entry["description"] = _line(field.description)
            if not field.is_required() and not is_section(field.annotation):
                entry["default"] = field.get_default(call_default_factory=True, validated_data={})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Penstock run",
        **root,
    }


def server_page() -> str:
    """The page of a server's settings, in Markdown."""
    parts = [SERVER_HEAD]
    for part in SERVER_PARTS:
        fields = part.model_fields.items()
        if part is ServerConfig:
            above = {name for part in SERVER_PARTS[:-1] for name in part.model_fields}
            title, fields = "Checkpoints", [entry for entry in fields if entry[0] not in above]
        else:
            title = (part.__doc__ or "").partition("\n")[0].rstrip(".")
        parts.append(
            "\n".join([f"## {title}\n", *(_entry(name, part, field) for name, field in fields)])
        )
    return "\n".join(parts)


def server_schema() -> dict[str, Any]:
    """The JSON Schema of a server's file, draft 2020-12."""
    root = ServerConfig.model_json_schema()
    for name, entry in root["properties"].items():
        entry.pop("title", None)
        entry["description"] = _line(ServerConfig.model_fields[name].description)
    about = {"title": "Penstock training server", "description": _line(ServerConfig.__doc__)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, **about}


def texts() -> dict[str, str]:
    """The content of each generated file, by its name."""
    return {
        PAGE: page(),
        SCHEMA: _json(schema()),
        SERVER_PAGE: server_page(),
        SERVER_SCHEMA: _json(server_schema()),
    }


def main(argv: list[str] | None = None) -> int:
    """Write the files, or check them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.config.generate_docs")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("configs"))
    parser.add_argument("--check", action="store_true", help="only say which files are stale")
    arguments = parser.parse_args(argv)
    stale = [
        arguments.folder / name
        for name, text in texts().items()
        if not (arguments.folder / name).is_file()
        or (arguments.folder / name).read_text(encoding="utf-8") != text
    ]
    if arguments.check:
        for path in stale:
            sys.stderr.write(f"{path} is stale; run python -m penstock.config.generate_docs\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts()[path.name], encoding="utf-8")
    return 0


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _entry(name: str, section: type[ConfigSection], field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default `{_default(field)}`"
    kind = " or ".join(f"`{_kind(branch)}`" for branch in branches(field.annotation))
    only_with, not_with = conditions_of(section, name.rpartition(".")[2])
    conditions = dict.fromkeys(
        describe(condition) for condition in only_with if condition != TRAINS
    )
    notes = [f"only with {text}" for text in conditions]
    if "." in name:  # a server has no keys, and other names of the settings that limit a field
        notes[:0] = [IN_KEY[part.role] for part in field.metadata if isinstance(part, CacheKey)]
        limits = dict.fromkeys(
            setting
            for condition in not_with
            for setting in condition.reads or (condition.setting.removeprefix("."),)
        )
        if limits:
            notes.append(f"limited by {', '.join(f'`{setting}`' for setting in limits)}")
    if any(isinstance(part, NativeOnly) for part in field.metadata):
        notes.append("native backend only")
    line = "; ".join([f"{kind}, {default}", *filter(None, notes)])
    return f"### `{name}`\n\n{line}\n\n{_line(field.description)}\n"


IN_KEY: Mapping[Role, str] = {
    "always": "in the cache key",
    "unless default": "in the cache key",
    "by content": "in the cache key by content",
    "if evaluations decide": "in the cache key where evaluations decide the result",
    "never": "",
}


def _default(field: FieldInfo) -> str:
    # pydantic raises without `validated_data` where a factory takes the values before it.
    return shown(field.get_default(call_default_factory=True, validated_data={}))


def _kind(branch: Any) -> str:
    if branch is type(None):
        return "null"
    if get_origin(branch) is Literal:
        return "` or `".join(shown(value) for value in get_args(branch))
    if get_origin(branch) is list:
        items = branches(get_args(branch)[0])
        return f"list[{' or '.join(_kind(item).replace('`', '') for item in items)}]"
    if get_origin(branch) is dict:
        value = get_args(branch)[1]
        kinds = " or ".join(_kind(inner).replace("`", "") for inner in branches(value))
        return f"map[{'any' if value is Any else kinds}]"
    if isinstance(branch, type) and issubclass(branch, ConfigSection):
        return "map"
    return str(branch.__name__)


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.exit(main())
