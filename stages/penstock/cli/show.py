"""`penstock check`: the resolved config, as YAML that runs."""

from typing import Any

import yaml

from penstock.cli.console import Console
from penstock.config.run import RunConfig
from penstock.machine import check_machine


def show_config(run: RunConfig, console: Console) -> dict[str, Any]:
    """Print every field with its value; returns the same for --json."""
    check_machine(run)
    values = run.model_dump(mode="json")
    console.result(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip())
    return {"config": values}
