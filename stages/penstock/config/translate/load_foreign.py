"""From a config file of another tool to a `RunConfig`."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.fault import ConfigIssue, dotted, shown
from penstock.config.loading.fault_locations import ErrorLocator
from penstock.config.loading.load import build_run, read_document
from penstock.config.loading.validate import validate
from penstock.config.schema.run import RunConfig
from penstock.config.server.run_fields import SERVER
from penstock.config.translate.apply import (
    detect_dialect,
    find_dialect,
    translate,
    translate_native,
)
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.fit_parallel_sizes import Devices, devices_here
from penstock.config.translate.translation import (
    FATAL,
    GAPS,
    MISSING,
    Draft,
    Kind,
    Translation,
    put_at,
    value_at,
)
from penstock.core.errors import ConfigError

__all__ = ["detect_dialect", "load", "load_translation", "require_run"]


OF_A_SERVER = (
    "Without sections, {path} is read as a server's file: penstock serve {path} serves it. A run's "
    "settings are in sections, such as train: {{lr: 1e-5}}."
)


def load(
    path: Path,
    document: yaml12.Document,
    dialect: Dialect,
    overrides: Sequence[Override],
    notify: Callable[[str], None],
    *,
    strict: bool = False,
) -> RunConfig:
    """The run in a file in `dialect`. `notify` gets a line for each key that is left out.

    Raises ConfigError with a line for each error; with `strict` keys that are left out or doubtful
    are errors too.
    """
    translation = translate(document.value, dialect, _devices(overrides), path.parent)
    locator = ErrorLocator(document, overrides, path, translation)
    fatal: tuple[Kind, ...] = (*GAPS, "doubtful") if strict else FATAL
    errors = [locator.at_key(line.key, line.why) for line in translation.of(*fatal)]
    try:
        run = build_run(translation.settings, overrides, locator, errors, notify=notify)
    except ConfigError as error:
        if dialect is not SERVER:
            raise
        raise ConfigError(f"{error}\n  {OF_A_SERVER.format(path=path)}") from None
    for line in translation.of("left out"):
        _, text = locator.at_key(line.key, f"{shown(line.redacted_value)} is left out: {line.why}")
        notify(f"warning: {text}")
    notify(_summary(path, translation))
    return run


def load_translation(path: Path, name: str | None, devices: Devices) -> Translation:
    """The translation of a file; its settings are those of a valid run, with its placeholders.

    `name` is that of a dialect; None: it is detected. A file in Penstock's own format is not
    changed. Raises ConfigError if the file is not YAML, if there is no such dialect, if it is of no
    known tool, or if it is in Penstock's own format and not valid.
    """
    document = read_document(path, may_be_empty=False)
    if name is None:
        require_run(path, document.value)
    dialect = find_dialect(name) if name else detect_dialect(document.value)
    if dialect is None:
        if name is None:
            require_known(path, document.value)
        translation = translate_native(document.value, devices)
        build_run(document.value, (), ErrorLocator(document, (), path, translation))
        return translation
    return drop_invalid(translate(document.value, dialect, devices, path.parent))


# Kinds of keys whose numbers the summary has, and their words.
COUNTED: tuple[tuple[Kind, str], ...] = (
    ("left out", "left out"),
    ("approximated", "approximated"),
    ("no effect", "without effect here"),
    ("assumed", "added, as that tool's defaults"),
)


def _summary(path: Path, translation: Translation) -> str:
    numbers = [(len(translation.of(kind)), label) for kind, label in COUNTED]
    counts = ", ".join(f"{number} {label}" for number, label in numbers if number)
    doubtful = ", ".join(line.key for line in translation.of("doubtful"))
    return (
        f"{path} is written for {translation.title}"
        + (f"; of its keys: {counts}" if counts else "")
        + f"; penstock translate {path} lists them"
        + (f". Doubtful, check each: {doubtful}" if doubtful else "")
    )


def _devices(overrides: Sequence[Override]) -> Devices:
    overridden = {override.name: yaml12.scalar(override.text) for override in overrides}
    local = devices_here()
    count, nodes = overridden.get("launch.nproc_per_node"), overridden.get("launch.nnodes", 1)
    ranks = count if isinstance(count, int) and count > 0 else local.ranks
    return replace(local, ranks=ranks * (nodes if isinstance(nodes, int) and nodes > 0 else 1))


# Keys that such a file has, and with ! does not have, and what it is.
OTHER_FILES: Mapping[str, str] = {
    **dict.fromkeys(
        ("compute_environment", "distributed_type"),
        "accelerate's launch settings; write train.data_parallel_mode, train.zero_stage and launch"
        " in the run's config",
    ),
    "zero_optimization": "a DeepSpeed config; write train.zero_stage and train.precision in the"
    " run's config",
    **dict.fromkeys(
        ("export_dir !output_dir", "peft_config model !train_dataset !learning_rate"),
        "an export; penstock merge BASE ADAPTER -o OUT merges an adapter",
    ),
    **dict.fromkeys(
        ("quant_config model !train_dataset !learning_rate", "infer_backend !output_dir"),
        "inference; penstock chat MODEL answers prompts",
    ),
    "quantizer checkpointer !optimizer": "a quantization; write export.quantise in the run's"
    " config",
    "tasks checkpointer !optimizer": "an evaluation; penstock eval MODEL --harness TASKS evaluates",
    "prompt checkpointer !optimizer": "a generation; penstock chat MODEL answers prompts",
    "provider secrets": "settings of a cloud provider; penstock launch --print starts a run"
    " elsewhere",
}


def require_run(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a known file that is no training config."""
    for keys, meaning in OTHER_FILES.items():
        if all((key.strip("!") in values) is not key.startswith("!") for key in keys.split()):
            raise ConfigError(f"{path} is no training run: it is {meaning}.")


def require_known(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a file without a section of Penstock's own format."""
    if not values.keys() & RunConfig.model_fields.keys():
        names = ", ".join(sorted(map(str, values))[:6])
        raise ConfigError(
            f"{path} is a config of no known tool; its keys are {names}.\n"
            "  If it is one of axolotl, LLaMA-Factory, TRL, torchtune, ERNIEKit or NxDT, write"
            " --dialect NAME."
        )


# Settings that every run needs, with values that are used to validate the rest.
PLACEHOLDERS: Mapping[str, Any] = {
    "model.model_path": "path/to/model",
    "data.datasets": [{"path": "data/train.jsonl"}],
    "train.output_dir": "outputs/run",
}

# Removing a setting can uncover errors of others, but only a few times.
MAX_ROUNDS = 20


def drop_invalid(translation: Translation) -> Translation:
    """The translation without invalid settings, whose keys are refused with the reason; settings
    that are missing are among its placeholders.

    Raises ConfigError if an error is of no setting of the file.
    """
    draft = Draft({}, {})
    draft.settings = deepcopy(dict(translation.settings))
    draft.lines = {line.key: line for line in translation.lines}
    placeholders = dict(translation.placeholders)
    issues: list[ConfigIssue] = []
    for _ in range(MAX_ROUNDS):
        settings = deepcopy(draft.settings)
        for name, value in placeholders.items():
            put_at(settings, name, value)
        issues = validate(settings).faults
        if not issues:
            lines = tuple(draft.lines.values())
            return replace(
                translation, settings=draft.settings, lines=lines, placeholders=placeholders
            )
        # The first issue of each path, the last path first: removing an item renumbers those after.
        for issue in {issue.path: issue for issue in reversed(issues)}.values():
            name = dotted(issue.path)
            if name in PLACEHOLDERS and not draft.has(name):
                placeholders[name] = PLACEHOLDERS[name]
            else:
                _drop(draft, issue)
    raise ConfigError("\n".join(f"{dotted(issue.path)}: {issue.text}" for issue in issues))


def _drop(draft: Draft, issue: ConfigIssue) -> None:
    # Remove the setting of an error, or else the first one that the error depends on.
    for name in (dotted(issue.path), *issue.reads):
        value = draft.value(name, MISSING)
        if value is MISSING:
            continue
        for line in draft.lines_of(name):
            line.names = [line_name for line_name in line.names if line_name != name]
            if line.kind == "assumed":
                draft.lines.pop(line.key)
            else:
                line.kind = "refused" if line.kind not in GAPS else line.kind
                line.why = f"here {name}: {shown(value)}, which {issue.text}"
        remove_at(draft.settings, name)
        return
    _drop_item(draft, dotted(issue.path), issue.text)


def _drop_item(draft: Draft, name: str, text: str) -> None:
    # Remove the item of a list that lacks a required setting, and the list if it is empty.
    item = name.rpartition(".")[0]
    above, _, index = item.rpartition(".")
    if not index.isdecimal() or not draft.has(item):
        return
    for line in draft.lines_of(item):
        line.names = [
            line_name for line_name in line.names if not f"{line_name}.".startswith(f"{item}.")
        ]
        if line.kind not in GAPS and not line.names:
            line.kind, line.why = "refused", f"here {name}, which is {text}"
    remove_at(draft.settings, item)
    if not draft.value(above):
        remove_at(draft.settings, above)


def remove_at(settings: dict[str, Any], name: str) -> None:
    """Remove the value at a dotted name in nested mappings and lists."""
    above, _, last = name.rpartition(".")
    parent = value_at(settings, above) if above else settings
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        parent.pop(last)
