"""What decides what a reference model makes of answers, besides its weights and the answers."""

from typing import Any

from penstock.config.schema.base import Settings
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import RunConfig
from penstock.identity import identity_fields

OF_NUMBERS = ("enable_fp8_training", "fp8")
"""Settings of training that decide how layers compute, besides the precision."""

QUANTISED = ("enable_qlora", "quant_format", "quant_group_size", "exclude_modules")
"""Settings of adapters that decide what is beneath them."""


class ReferenceSettings(Settings):
    """The identity of scores: nothing of what is learnt from them, nor of adapters."""

    model: dict[str, Any]
    computes_in: str
    """What layers compute in, as torch calls it."""
    numbers: dict[str, Any]
    quantised: dict[str, Any] | None
    """How the base model beneath adapters is kept, where it is quantised."""
    seed: int | None
    """What weights are drawn from, where none are given."""


def reference_settings(run: RunConfig, *, has_weights: bool) -> ReferenceSettings:
    """What a run says of its reference model."""
    return ReferenceSettings(
        model=identity_fields(run, "model"),
        computes_in=run.train.computes_in,
        numbers=identity_fields(run, "train", OF_NUMBERS),
        quantised=identity_fields(run, "lora", QUANTISED) if run.lora.enable_qlora else None,
        seed=None if has_weights else run.train.seed,
    )


def reference_run(run: RunConfig) -> RunConfig:
    """The run as its reference model is laid out: of adapters there are only such as change
    nothing, which keep the weights beneath them as small as in training."""
    lora = LoraConfig()
    if run.lora.enable_lora:
        kept = {name: getattr(run.lora, name) for name in QUANTISED}
        lora = LoraConfig(enable_lora=True, lora_rank=1, **kept)
    plain = {"optimizer": "sgd", "optimizer_offload": "none", "fuse_optimizer_step": False}
    # They are of what training adds to an optimizer or takes from it.
    unset = {"optimizer_kwargs": {}, "optimizer_dtype": "fp32", "init_checkpoint_path": None}
    train = run.train.model_copy(update={**plain, **unset})
    return run.model_copy(update={"lora": lora, "train": train})
