"""`penstock.load`: builds a `Run` from a config and overrides."""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from penstock.api.load_config import Config, load_config
from penstock.api.overrides import Overrides, parse_overrides
from penstock.api.pipeline import Notify
from penstock.api.run import Run, print_line


class Sections(TypedDict, total=False):
    """The sections of a config; each is a mapping of fields to values."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    train: Mapping[str, Any]
    lora: Mapping[str, Any]
    preference: Mapping[str, Any]
    pipeline: Mapping[str, Any]
    launch: Mapping[str, Any]
    export: Mapping[str, Any]
    push: Mapping[str, Any]
    release: Mapping[str, Any]


def load(
    config: Config,
    *overrides: Overrides,
    notify: Notify = print_line,
    **sections: Unpack[Sections],
) -> Run:
    """Load a config with overrides; nothing is run yet.

    `config` is a YAML file, a `train.output_dir` of an earlier run, nested mappings as parsed from
    YAML, or a `RunConfig`. Each of `overrides` is a setting as on the command line
    (`"train.lr=1e-5"`, `"--train.lr=1e-5"`) or a mapping of dotted names to values
    (`{"train.lr": 1e-5}`); `sections` set fields (`train={"lr": 1e-5}`). Later ones win, and
    sections come last. `notify` receives each log line; by default it writes to stderr.

    Raises ConfigError, whose text has a line for each fault.
    """
    parsed = parse_overrides(overrides, sections)
    return Run(load_config(config, parsed, notify), notify)
