"""The config fields in the cache key of training: those that decide its result.

Whether a field of `model`, `train` or `lora` is in the key is declared with the field
(`config/schema/cache_key.py`), and so is when it has an effect (`config/schema/effect.py`): a value
without effect is in no key. Runs with equal keyed fields share one result.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import cache_key, fields_keyed
from penstock.config.schema.effect import without_unused
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.model import ModelConfig
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.extensions import LOSSES, METRICS, OPTIMIZERS

KEYED_SECTIONS: Mapping[str, type[ConfigSection]] = {
    "model": ModelConfig,
    "train": TrainConfig,
    "lora": LoraConfig,
}

# The rows that are evaluated on.
AMOUNT = ("eval_max_batches", "eval_rows_per_batch")

# Versions of layers that compute otherwise than they did under the same settings, by model type.
# Raising one trains again what has such layers, and nothing else. `sparse_attention` 2: of equal
# index scores the earliest tokens are selected.
LAYER_VERSIONS: Mapping[str, Mapping[str, int]] = {
    "deepseek_v32": {"sparse_attention": 2},
    "glm_moe_dsa": {"sparse_attention": 2},
}


def identity_fields(
    run: RunConfig, section: str, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """The keyed fields of a section, or those of `names`, as JSON in alphabetical order."""
    kind = KEYED_SECTIONS[section]
    included = set(fields_keyed(kind, "always", "unless default") if names is None else names)
    used = getattr(without_unused(run), section)
    values = used.model_dump(mode="json", include=included)
    for name in values:
        if instead := cache_key(kind, name).value:
            values[name] = getattr(used, instead)
    return {name: values[name] for name in sorted(values)}


def eval_identity_fields(run: RunConfig) -> dict[str, Any] | None:
    """The evaluation settings, if evaluations decide when a run ends or which checkpoint is its
    result; if they are the result, those that say of what; else None."""
    train = without_unused(run).train
    records = {name: METRICS.record(name, options) for name, options in train.eval_metrics.items()}
    metrics = {"eval_metrics": records} if records else {}
    if train.eval_only:
        written = (name for name in AMOUNT if train.is_non_default(name))
        return {**{name: getattr(train, name) for name in written}, **metrics} or None
    if not train.early_stopping.patience and not train.save_best.metric:
        return None
    fields = train.model_dump(
        mode="json", include=set(fields_keyed(TrainConfig, "if evaluations decide"))
    )
    # In `metrics`, with the versions of the packages that have them.
    del fields["eval_metrics"]
    # Left out if unset, so that keys from before the field existed stay valid.
    if fields["eval_rows_per_batch"] is None or not train.counts_batches:
        del fields["eval_rows_per_batch"]
    return {**fields, **metrics}


def part_identity(run: RunConfig) -> dict[str, Any]:
    """What training uses of packages, with their versions; empty if all is ours."""
    train = without_unused(run).train
    records = {
        "loss": LOSSES.record(train.loss, train.loss_kwargs),
        # Its arguments are in the key as those of ours are.
        "optimizer": None if "." in train.optimizer else OPTIMIZERS.record(train.optimizer),
    }
    return {name: record for name, record in records.items() if record}


def preference_identity(run: RunConfig) -> dict[str, Any] | None:
    """The settings of preference training; None for other objectives."""
    if run.train.objective != "preference":
        return None
    # The pairing for the KL estimate is in the key of the packed rows, which is an input.
    preference = without_unused(run).preference.model_dump(
        mode="json", exclude={"precompute_ref_logps", "kl_pairing", "kl_rotation_size"}
    )
    if preference["sft_loss_scope"] == "answer":
        del preference["sft_loss_scope"]
    return preference
