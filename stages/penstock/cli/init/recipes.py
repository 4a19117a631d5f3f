"""`penstock init NAME`: copies a shipped recipe to this folder.

The recipes are `configs/quickstart.yaml` and the files of `configs/examples`, `configs/recipes` and
`configs/server`, which the package holds as its folders `examples`, `recipes` and `servers`.
"""

import json
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.cli.console import Console, table
from penstock.config.generate_docs import schema, server_schema
from penstock.config.loading.load import load
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.core.sources.local_files import detect_file_kind, missing_path_error
from penstock.prepare.builtin import arithmetic

SCHEMA_FILE, SERVER_SCHEMA_FILE = "penstock.schema.json", "penstock-server.schema.json"
"""Written beside a copied recipe, so that editors complete and check it."""
SERVER_PREFIX = "server-"
"""Prefix of the names of recipes for `penstock serve`."""
MODELINE = "# yaml-language-server: $schema="
NUM_SAMPLES = 300


def recipes() -> dict[str, Traversable]:
    """The shipped recipes by name: the quickstart first, recipes for servers last."""
    package = resources.files("penstock")
    by_name = {
        f"{prefix}{file.name.removesuffix('.yaml')}": file
        for folder, prefix in (("examples", ""), ("recipes", ""), ("servers", SERVER_PREFIX))
        # Files of a package in a zip archive have no order of their own.
        for file in sorted((package / folder).iterdir(), key=lambda e: e.name)
        if file.name.endswith(".yaml")
    }
    return {"quickstart": package / "quickstart.yaml", **by_name}


def summary(recipe: Traversable) -> str:
    """The recipe's first comment below the modeline: its purpose in one line."""
    return recipe.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")


def list_recipes(console: Console) -> dict[str, Any]:
    """Print every recipe with its purpose; returns the same."""
    summaries = {name: summary(file) for name, file in recipes().items()}
    console.result(table([("name", "what it is for"), *summaries.items()]))
    return {"recipes": summaries}


def copy_recipe(
    name: str, target: Path, console: Console, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the recipe to `target`, and the schema beside it for editors; returns their paths.

    Raises ConfigError for an unknown name or an existing file, StageError if it is not writable.
    """
    files = recipes()
    if name not in files and detect_file_kind(name):
        raise missing_path_error(name)
    name = name.removesuffix(".yaml")
    if name not in files:
        raise ConfigError(f"no recipe has the name {name}.\n  Recipes are {', '.join(files)}.")
    _, _, body = files[name].read_text(encoding="utf-8").partition("\n")
    if name.startswith(SERVER_PREFIX):
        return write_config(target, body, SERVER_SCHEMA_FILE, console, overwrite=overwrite)
    written = write_config(target, body, SCHEMA_FILE, console, overwrite=overwrite)
    return written | write_samples(target, console)


def write_config(
    target: Path, body: str, schema_name: str, console: Console, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the config, and the schema beside it; returns their paths. Raises ConfigError for an
    existing file without `overwrite`, StageError if it is not writable."""
    serves = schema_name == SERVER_SCHEMA_FILE
    editors = target.with_name(schema_name)
    try:
        # `x` also refuses a file that is created between a check and this line.
        with target.open("w" if overwrite else "x", encoding="utf-8") as stream:
            stream.write(f"{MODELINE}./{schema_name}\n{body}")
        text = json.dumps(server_schema() if serves else schema(), indent=2)
        editors.write_text(text + "\n", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{target} exists already and is not overwritten.\n"
            "  Move it, name another file with -o, or add --overwrite."
        ) from None
    except OSError as error:
        raise StageError(f"{target} cannot be written: {describe_os_error(error)}.") from error
    command = f"serve {target}" if serves else f"check {target} and penstock run {target}"
    console.say(f"next: read {target} and edit it, then penstock {command}")
    console.result(str(target))
    return {"file": str(target), "schema": str(editors)}


def write_samples(config: Path, console: Console) -> dict[str, Any]:
    """Write sample conversations if a recipe names a local file that does not exist.

    Returns `data`, the file, if one was written.
    """
    run = load(config)
    for dataset in run.data.datasets:
        data = config.parent / str(dataset.path)
        if data.suffix == ".jsonl" and dataset.type == "chat" and not data.exists():
            data.parent.mkdir(parents=True, exist_ok=True)
            rows = map(json.dumps, islice(arithmetic(), NUM_SAMPLES))
            data.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
            console.say(f"{data}: {NUM_SAMPLES} sample conversations, to be replaced by your own")
            return {"data": str(data)}
    return {}
