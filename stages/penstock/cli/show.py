"""`penstock check`: the resolved config, as YAML that runs."""

from pathlib import Path
from typing import Any

import yaml

from penstock.cli.console import Console
from penstock.config.run import RunConfig
from penstock.core import local_files
from penstock.core.errors import ElsewhereError, UnreachableError
from penstock.machine import check_machine


def show_config(run: RunConfig, console: Console) -> dict[str, Any]:
    """Print every field with its value; returns the same for --json.

    What depends on a model that is on the hub, or on another machine, and cannot be asked now is
    left unjudged, and that is said.
    """
    try:
        _require_model_folder(run.model.config_source)
        check_machine(run)
    except (ElsewhereError, UnreachableError) as error:
        console.say(f"not checked against the model: {error}")
    values = run.model_dump(mode="json")
    console.result(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip())
    return {"config": values}


def _require_model_folder(source: str) -> None:
    """Raise ConfigError for a local folder that is not there, whether or not anything would ask it
    now: what is an error must not depend on the objective."""
    if local_files.looks_local(source) and not Path(source).expanduser().exists():
        raise local_files.missing(source)
