"""Warnings before a run starts: settings that are valid but probably not intended."""

from collections.abc import Iterator

from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.lr_schedule import ENDING
from penstock.config.schema.run import RunConfig, has_target, is_explicitly_set

COMMON_LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
"""LoRA settings that may be written without LoRA, for a later run."""

HIGH_LR = 0.1
"""From this learning rate on, a decimal place is probably wrong, with Adam-like optimizers."""

LORA_LR = "2e-4"
"""A usual peak learning rate of adapters, about ten times that of all weights."""

LIKE_ADAM = ("adamw", "anyprecision_adamw", "muon")

SELECTION_FIELDS = (
    "name",
    "split",
    "data_files",
    "splits_string",
    "shards",
    "shards_idx",
    "max_samples",
)
"""Settings of a data set that select its records."""


def iter_notices(run: RunConfig) -> Iterator[str]:
    """Lines that begin with the setting."""
    if run.train.optimizer == "muon" and run.lora.enable_lora:
        yield (
            "train.optimizer: muon is for full weight matrices, and with enable_lora: true none are"
            " trained: AdamW trains the adapters with train.lr, and muon_lr is not used"
        )
    asked = [name for name in COMMON_LORA_FIELDS if is_explicitly_set(run, f"lora.{name}")]
    if asked and not run.lora.enable_lora and not is_explicitly_set(run, "lora.enable_lora"):
        yield (
            f"lora.{asked[0]}: is not used without lora.enable_lora: true, and all weights are"
            " trained; write lora.enable_lora: true, or false to confirm"
        )
    yield from _iter_lr_notices(run)
    yield from _iter_test_data_notices(run)
    if has_target(run) and run.pipeline.stages is not None and "push" not in run.stages:
        yield "push: has a target, but pipeline.stages has no push: nothing is uploaded"


def _iter_lr_notices(run: RunConfig) -> Iterator[str]:
    train = run.train
    if not train.lr and not train.eval_only:
        yield "train.lr: is 0, so nothing is trained; write a learning rate such as 1e-5"
    if run.lora.enable_lora and not is_explicitly_set(run, "train.lr") and not train.eval_only:
        yield (
            f"train.lr: is {train.lr:g}, the default, and LoRA usually trains at 1e-4 to 3e-4;"
            f" write train.lr: {LORA_LR}, or {train.lr:g} to confirm"
        )
    is_factor = train.lr_decay_style in ("noam", "noam_hold")
    if train.lr >= HIGH_LR and train.optimizer in LIKE_ADAM and not is_factor:
        yield (
            f"train.lr: {train.lr:g} is far above usual values of {train.optimizer} (1e-6 to 1e-2);"
            " check its decimal places"
        )
    if train.lr_decay_style not in ENDING and train.is_non_default("lr_min"):
        yield (
            f"train.lr_min: lr_decay_style: {train.lr_decay_style} does not decay to it; write"
            " cosine or linear, or leave lr_min out"
        )


def _iter_test_data_notices(run: RunConfig) -> Iterator[str]:
    trained = [_selected_records(entry) for entry in run.data.datasets]
    for index, entry in enumerate(run.data.test_datasets):
        if _selected_records(entry) in trained:
            yield (
                f"data.test_datasets.{index}: {entry.path} is trained on too, so its loss measures"
                " memorization; use other data, or write data.val_set_size"
            )


def _selected_records(entry: DatasetConfig) -> tuple[object, ...]:
    return entry.path, *(str(getattr(entry, name)) for name in SELECTION_FIELDS)
