"""What is worth a line before a run begins: settings that only part of the model can honour."""

from collections.abc import Iterator

from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.lr_schedule import ENDING
from penstock.config.schema.run import RunConfig, has_target, is_explicitly_set

OF_ANY_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings that may be written and switched off, for the next run."""

HIGH = 0.1
"""Learning rates from here on are slips of a decimal place for optimizers like Adam."""

LIKE_ADAM = ("adamw", "anyprecision_adamw", "muon")

CHOOSES = ("name", "split", "data_files", "splits_string", "shards", "shards_idx", "max_samples")
"""Settings of a data set that say which of its records are read."""


def iter_notices(run: RunConfig) -> Iterator[str]:
    """A line for each of them, in which the setting stands first."""
    if run.train.optimizer == "muon" and run.lora.enable_lora:
        yield (
            "train.optimizer: muon steps whole weight matrices, and with enable_lora: true none are"
            " trained: AdamW steps the adapters, at train.lr, and muon_lr is not used"
        )
    asked = [name for name in OF_ANY_ADAPTER if is_explicitly_set(run, f"lora.{name}")]
    if asked and not run.lora.enable_lora and not is_explicitly_set(run, "lora.enable_lora"):
        yield (
            f"lora.{asked[0]}: is not used without lora.enable_lora: true, and the whole model is"
            " trained; write it, or false if that is meant"
        )
    yield from _of_rates(run)
    yield from _of_samples(run)
    if has_target(run) and run.pipeline.stages is not None and "push" not in run.stages:
        yield "push: a target is written, and pipeline.stages has no push: nothing is sent"


def _of_rates(run: RunConfig) -> Iterator[str]:
    train = run.train
    if not train.lr and not train.eval_only:
        yield "train.lr: is 0, and nothing is learnt; write a rate such as 1e-5"
    is_scale = train.lr_decay_style in ("noam", "noam_hold")
    if train.lr >= HIGH and train.optimizer in LIKE_ADAM and not is_scale:
        yield (
            f"train.lr: {train.lr:g} is far above what {train.optimizer} learns at (1e-6 to 1e-2);"
            " look at its decimal places"
        )
    if train.lr_decay_style not in ENDING and train.asks_for("lr_min"):
        yield (
            f"train.lr_min: lr_decay_style: {train.lr_decay_style} does not come down to it; write"
            " cosine or linear, or leave lr_min out"
        )


def _of_samples(run: RunConfig) -> Iterator[str]:
    trained = [_records(entry) for entry in run.data.datasets]
    for index, entry in enumerate(run.data.test_datasets):
        if _records(entry) in trained:
            yield (
                f"data.test_datasets.{index}: {entry.path} is trained on too, and tells what was"
                " learnt by heart; name other files, or write data.val_set_size"
            )


def _records(entry: DatasetConfig) -> tuple[object, ...]:
    return entry.path, *(str(getattr(entry, name)) for name in CHOOSES)
