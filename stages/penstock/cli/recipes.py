"""`penstock init NAME`: a shipped recipe, copied to where it will be changed.

The recipes are `configs/quickstart.yaml`, the files of `configs/examples`, which the package holds
as its folder `recipes`, and those of `configs/server`, which it holds as `servers`.
"""

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from penstock.cli.console import Console, table
from penstock.config.reference import schema, server_schema
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_faults import reason_of

SCHEMA_FILE, SERVER_SCHEMA_FILE = "penstock.schema.json", "penstock-server.schema.json"
"""Written beside a copied recipe, so that editors complete and check it."""
OF_SERVERS = "server-"
"""Begins the names of recipes for `penstock serve`."""
MODELINE = "# yaml-language-server: $schema="


def recipes() -> dict[str, Traversable]:
    """The shipped recipes by name, the quickstart first, those of servers last."""
    package = resources.files("penstock")
    found = {
        f"{prefix}{each.name.removesuffix('.yaml')}": each
        for folder, prefix in (("recipes", ""), ("servers", OF_SERVERS))
        for each in sorted((package / folder).iterdir(), key=lambda e: e.name)
        if each.name.endswith(".yaml")
    }
    return {"quickstart": package / "quickstart.yaml", **found}


def summary(recipe: Traversable) -> str:
    """The recipe's first comment below the modeline: what it is for, in one line."""
    return recipe.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")


def list_recipes(console: Console) -> None:
    """Print every recipe with what it is for."""
    rows = [("name", "what it is for")]
    console.result(table(rows + [(name, summary(file)) for name, file in recipes().items()]))


def copy_recipe(name: str, folder: Path, console: Console) -> None:
    """Write `<name>.yaml` in `folder`, and the schema beside it for editors.

    Raises ConfigError for a name no recipe has or a file that is there, StageError if unwritable.
    """
    known = recipes()
    name = name.removesuffix(".yaml")
    if name not in known:
        raise ConfigError(f"no recipe is called {name}.\n  Recipes are {', '.join(known)}.")
    target = folder / f"{name}.yaml"
    serves = name.startswith(OF_SERVERS)
    beside = SERVER_SCHEMA_FILE if serves else SCHEMA_FILE
    editors = json.dumps(server_schema() if serves else schema(), indent=2)
    _, _, body = known[name].read_text(encoding="utf-8").partition("\n")
    try:
        with target.open("x", encoding="utf-8") as stream:
            stream.write(f"{MODELINE}./{beside}\n{body}")
        (folder / beside).write_text(editors + "\n", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{target} is there already and stays as it is.\n  Move it, or go to another folder."
        ) from None
    except OSError as error:
        raise StageError(f"{target} cannot be written: {reason_of(error)}.") from error
    then = f"serve {target}" if serves else f"plan {target} and penstock run {target}"
    console.say(f"next: edit {target}, then penstock {then}")
    console.result(str(target))
