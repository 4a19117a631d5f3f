"""`penstock init NAME`: a shipped recipe, copied to where it will be changed.

The recipes are the files of `configs/examples`, which the package holds as its folder `recipes`.
"""

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from penstock.cli.console import Console, table
from penstock.config.reference import schema
from penstock.core.errors import ConfigError, StageError
from penstock.core.store import reason_of

SCHEMA_FILE = "penstock.schema.json"
"""Written beside a copied recipe, so that editors complete and check it."""
MODELINE = "# yaml-language-server: $schema="


def recipes() -> dict[str, Traversable]:
    """The shipped recipes by name, in order."""
    folder = resources.files("penstock") / "recipes"
    found = {each.name.removesuffix(".yaml"): each for each in folder.iterdir()}
    return {name: found[name] for name in sorted(found) if found[name].name.endswith(".yaml")}


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
    _, _, body = known[name].read_text(encoding="utf-8").partition("\n")
    try:
        with target.open("x", encoding="utf-8") as stream:
            stream.write(f"{MODELINE}./{SCHEMA_FILE}\n{body}")
        (folder / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{target} is there already and stays as it is.\n  Move it, or go to another folder."
        ) from None
    except OSError as error:
        raise StageError(f"{target} cannot be written: {reason_of(error)}.") from error
    console.say(f"next: edit {target}, then penstock plan {target} and penstock run {target}")
    console.result(str(target))
