"""Loads the config of a run from a file, an output folder, mappings or a RunConfig."""

import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.api.overrides import plain_settings
from penstock.config.loading import load as loading
from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.expand_paths import anchor_paths
from penstock.config.loading.fault_locations import ErrorLocator
from penstock.config.schema.run import RunConfig
from penstock.train.launch.job import JOB, read_job

Config = str | PathLike[str] | Mapping[str, Any] | RunConfig


def load_config(
    config: Config,
    overrides: Sequence[Override] = (),
    notify: Callable[[str], None] = lambda _: None,
    *,
    strict: bool = False,
) -> RunConfig:
    """The validated config of a YAML file, a `train.output_dir`, nested mappings as parsed from
    YAML, or a RunConfig, with the overrides applied in order. Relative paths in the config of a run
    are those of the folder where the run was started, unless its own folder was moved.

    `notify` and `strict` are those of `config.loading.load`.
    Raises ConfigError, whose text has a line for each fault.
    """
    if isinstance(config, RunConfig):
        if not overrides:
            return config
        return loading.loads(config.model_dump(mode="json", exclude_unset=True), overrides)
    if isinstance(config, Mapping):
        locator = ErrorLocator(yaml12.Document(), overrides)
        return loading.build_run(plain_settings(config), overrides, locator, notify=notify)
    path = Path(config)
    # `Path.is_file` raises for a name that is too long, which `load` reports.
    if os.path.isfile(path / JOB):  # noqa: PTH113 - of any name
        job = read_job(path / JOB)
        if "working_dir" in job and Path(job["output_dir"]) == path.resolve():
            anchor_paths(job["config"], Path(job["working_dir"]))
        return loading.loads(job["config"], overrides)
    return loading.load(path, overrides, notify, strict=strict)
