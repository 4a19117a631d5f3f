"""Warnings before a run starts: settings that are valid but probably not intended."""

from collections.abc import Iterator

from penstock.config.rules.effect import iter_effect_notices
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.memory import STOCHASTIC
from penstock.config.schema.run import RunConfig, has_target, is_explicitly_set
from penstock.config.schema.train import TrainConfig
from penstock.core.remote.urls import redact

# LoRA settings that may be written without LoRA, for a later run.
COMMON_LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")

# From this learning rate on, a decimal place is probably wrong, with Adam-like optimizers.
HIGH_LR = 0.1

# A usual peak learning rate of adapters, about ten times that of all weights.
LORA_LR = "2e-4"

LIKE_ADAM = ("adamw", "anyprecision_adamw", "muon")

# `initializer_range` of most models.
TYPICAL_WEIGHT = 0.02

# A change below this share of any weight is rounded away: a quarter of the spacing of numbers just
# above a power of two, relative to it.
ROUNDED_AWAY = {"bfloat16": 2.0**-9, "float32": 2.0**-25}

# Settings of a data set that select its records.
SELECTION_FIELDS = (
    "name",
    "split",
    "data_files",
    "splits_string",
    "shards",
    "shards_idx",
    "max_samples",
)


def iter_notices(run: RunConfig) -> Iterator[str]:
    """Lines that begin with the setting."""
    if run.train.optimizer == "muon" and run.lora.enable_lora:
        yield (
            "train.optimizer: muon is for full weight matrices, and with enable_lora: true none are"
            " trained: AdamW trains the adapters with train.lr, and muon_lr is not used"
        )
    written = [name for name in COMMON_LORA_FIELDS if is_explicitly_set(run, f"lora.{name}")]
    if written and not run.lora.enable_lora and not is_explicitly_set(run, "lora.enable_lora"):
        yield (
            f"lora.{written[0]}: is not used without lora.enable_lora: true, and all weights are"
            " trained; write lora.enable_lora: true, or false to confirm"
        )
    yield from iter_effect_notices(run)
    yield from _iter_lr_notices(run)
    for index, entry in enumerate(run.data.datasets):
        if not entry.is_read:
            yield f"data.datasets.{index}.weight: is 0, so {redact(entry.path)} is not read"
    yield from _iter_test_data_notices(run)
    if has_target(run) and run.pipeline.stages is not None and "push" not in run.stages:
        yield "push: has a target, but pipeline.stages has no push: nothing is uploaded"


def _iter_lr_notices(run: RunConfig) -> Iterator[str]:
    train = run.train
    if train.max_steps and (train.lr_warmup_steps or 0) >= train.max_steps:
        yield (
            f"train.lr_warmup_steps: is {train.lr_warmup_steps}, and training ends after"
            f" {train.max_steps} (max_steps), before the learning rate is reached"
        )
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
    yield from _iter_rounding_notices(train)


def _iter_rounding_notices(train: TrainConfig) -> Iterator[str]:
    # A learning rate whose steps most weights are too coarse for: an Adam-like optimizer changes a
    # weight by about `lr`.
    share = ROUNDED_AWAY.get(train.keeps_in)
    if (
        not share
        or train.compensates_rounding
        or train.optimizer not in LIKE_ADAM
        or train.eval_only
    ):
        return
    if not 0 < train.lr < share * TYPICAL_WEIGHT:
        return
    lost = f"train.lr: steps of {train.lr:g} change no weight above {train.lr / share:.1g}"
    if train.keeps_in == "float32":
        yield f"{lost}, because float32 rounds them away; check its decimal places"
        return
    rounding = "stochastic_rounding: true, or " if train.optimizer in STOCHASTIC else ""
    yield f"{lost}, because bfloat16 rounds them away; write train.{rounding}precision: bf16_mixed"


def _iter_test_data_notices(run: RunConfig) -> Iterator[str]:
    trained = [_selected_records(entry) for entry in run.data.read_datasets]
    for index, entry in enumerate(run.data.test_datasets):
        if _selected_records(entry) in trained:
            yield (
                f"data.test_datasets.{index}: {entry.path} is trained on too, so its loss measures"
                " memorization; use other data, or write data.val_set_size"
            )


def _selected_records(entry: DatasetConfig) -> tuple[object, ...]:
    return entry.path, *(str(getattr(entry, name)) for name in SELECTION_FIELDS)
