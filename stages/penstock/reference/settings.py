"""Settings that change reference log-probs, besides the model weights and the samples."""

from typing import Any

from pydantic import Field

from penstock.config.identity import identity_fields
from penstock.config.schema.base import Settings
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import RunConfig
from penstock.encode.settings import encode_settings
from penstock.engine.model_source import ModelSource

NUMERICS_FIELDS = ("enable_fp8_training", "fp8")
"""`train` settings that change layer numerics, besides the compute dtype."""

QUANTIZED = ("enable_qlora", "quant_format", "quant_group_size", "exclude_modules")
"""`lora` settings that change the base model (QLoRA quantization)."""


class ReferenceSettings(Settings):
    """Cache identity of reference log-probs; independent of the preference loss."""

    model: dict[str, Any]
    computes_in: str
    """Compute dtype of layers, by its torch name."""
    numbers: dict[str, Any]
    quantized: dict[str, Any] | None
    """Quantization of the base model with QLoRA, else None."""
    seed: int | None
    """Seed of random initialization; None if weights are loaded."""
    adapter: dict[str, Any] | None = None
    """Settings of the adapter that training starts from; None if it starts from none."""
    encode_dtype: str | None = None
    """Data type of stored features of images; None where images are computed in the step."""
    layer_versions: dict[str, Any] = Field(default_factory=dict)
    """As in the settings of training."""


def reference_settings(
    run: RunConfig, origin: ModelSource, *, has_adapter: bool
) -> ReferenceSettings:
    """Build the reference settings of a run; `has_adapter`: it starts from a trained adapter."""
    return ReferenceSettings(
        model=identity_fields(run, "model"),
        computes_in=run.train.computes_in,
        numbers=identity_fields(run, "train", NUMERICS_FIELDS),
        quantized=identity_fields(run, "lora", QUANTIZED) if run.lora.enable_qlora else None,
        seed=None if origin.weights else run.train.seed,
        adapter=identity_fields(run, "lora") if has_adapter else None,
        encode_dtype=encode_settings(run).dtype if run.data.encode_images else None,
        layer_versions=dict(origin.layer_versions),
    )


def reference_run(run: RunConfig, *, has_adapter: bool) -> RunConfig:
    """Config with which the reference model is built: that which training starts from.

    With LoRA, it has the adapter that training starts from (`has_adapter`), or untrained rank-1
    adapters, which change no output but keep the base weights as small (frozen, quantized) as in
    training.
    """
    lora = LoraConfig()
    if has_adapter:
        lora = run.lora
    elif run.lora.enable_lora:
        quantization = {name: getattr(run.lora, name) for name in QUANTIZED}
        lora = LoraConfig(enable_lora=True, lora_rank=1, **quantization)
    plain = {"optimizer": "sgd", "optimizer_offload": "none", "fuse_optimizer_step": False}
    # Reset optimizer and initialization settings, which do not apply to a forward pass.
    unset = {"optimizer_kwargs": {}, "optimizer_dtype": "fp32", "init_checkpoint_path": None}
    train = run.train.model_copy(update={**plain, **unset})
    return run.model_copy(update={"lora": lora, "train": train})


def unread_rows_line(read: int, rows: int, set_by: str) -> str | None:
    """Line about log-probs that training does not read, if the setting `set_by` ends it after
    `read` of all `rows`; None if it reads all.

    They are computed nevertheless: a cache key is known before rows are counted, and other runs
    share the result.
    """
    if read >= rows:
        return None
    return (
        f"log-probs of all {rows:,} rows are computed, and training reads {read:,} of them "
        f"(train.{set_by}); data.datasets.*.max_samples bounds both"
    )
