"""Files beside the configs of training runs: what each is, and what does its work here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError

OTHER_FILES: Mapping[tuple[str, ...], str] = {
    ("compute_environment",): "accelerate's launch settings; write train.data_parallel_mode,"
    " train.zero_stage and launch in the run's config",
    ("distributed_type",): "accelerate's launch settings; write train.data_parallel_mode,"
    " train.zero_stage and launch in the run's config",
    ("zero_optimization",): "a DeepSpeed config; write train.zero_stage and train.precision in the"
    " run's config",
    (
        "export_dir",
        "!output_dir",
    ): "an export; penstock merge BASE ADAPTER -o OUT merges an adapter",
    (
        "peft_config",
        "model",
        "!train_dataset",
        "!learning_rate",
    ): "an export; penstock merge BASE ADAPTER -o OUT merges an adapter",
    (
        "quant_config",
        "model",
        "!train_dataset",
        "!learning_rate",
    ): "inference; penstock chat MODEL answers prompts",
    ("infer_backend", "!output_dir"): "inference; penstock chat MODEL answers prompts",
    (
        "quantizer",
        "checkpointer",
        "!optimizer",
    ): "a quantization; write export.quantise in the run's config",
    (
        "tasks",
        "checkpointer",
        "!optimizer",
    ): "an evaluation; penstock eval MODEL --harness TASKS evaluates",
    ("prompt", "checkpointer", "!optimizer"): "a generation; penstock chat MODEL answers prompts",
    ("provider", "secrets"): "settings of a cloud provider; penstock launch --print starts a run"
    " elsewhere",
}
"""Keys that such a file has, and with ! does not have, and what it is."""


def require_run(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a known file that is no training config."""
    for keys, meaning in OTHER_FILES.items():
        if all((key.removeprefix("!") in values) is not key.startswith("!") for key in keys):
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
