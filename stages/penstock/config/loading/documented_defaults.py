"""Documented defaults that a run cannot use.

A setting that is written with its documented default means the same as one that is left out. So if
the default does not fit the rest of the run, it is ignored, and a notice says what is used instead.
Any other value that does not fit is an error of the rules.
"""

from collections.abc import Iterator
from typing import cast

from penstock.config.loading.fault import shown
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig, is_explicitly_set

DOCUMENTED_INIT_DEVICE = "cuda"

# Their real defaults are null, which means a value that fits the rest of the run.
DOCUMENTED_GROUP = 16


def with_usable_defaults(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run without unusable documented defaults, and a notice for each of them."""
    notices: list[str] = []
    for name, instead in _unusable(run):
        value = getattr(getattr(run, name.split(".")[0]), name.split(".")[1])
        notices.append(f"{name}: {shown(value)} is the documented default, and {instead}")
        run = _left_out(run, name)
    # Of one format it is the only group there is, and without QLoRA it asks for nothing.
    if run.lora.quant_group_size == DOCUMENTED_GROUP and not (
        run.lora.enable_qlora and len(GROUPS[run.lora.quant_format]) > 1
    ):
        run = _left_out(run, "lora.quant_group_size")
    if run.lora.enable_qlora and not run.lora.enable_lora:
        lora = run.lora.model_copy(update={"enable_lora": True})
        run = run.model_copy(update={"lora": lora})
    return run, notices


def _unusable(run: RunConfig) -> Iterator[tuple[str, str]]:
    # Settings that are written with a documented default that does not fit, and what is used
    # instead.
    lora, train, data = run.lora, run.train, run.data
    if lora.enable_qlora and not lora.enable_lora and is_explicitly_set(run, "lora.enable_lora"):
        yield "lora.enable_lora", "enable_qlora: true trains adapters: true is used"
    groups = GROUPS[lora.quant_format]
    if lora.enable_qlora and lora.quant_group_size == DOCUMENTED_GROUP not in groups:
        has = f"groups of {groups[0]}" if groups else "one scale for each row"
        yield "lora.quant_group_size", f"{lora.quant_format} has {has}, which is used"
    if (
        train.precision in ("fp32", "bf16")
        and train.enable_mixed_precision
        and is_explicitly_set(run, "train.enable_mixed_precision")
    ):
        yield "train.enable_mixed_precision", f"precision: {train.precision} decides"
    if (
        train.zero_stage in (1, 2)
        and train.enable_full_shard
        and is_explicitly_set(run, "train.enable_full_shard")
    ):
        yield "train.enable_full_shard", f"zero_stage: {train.zero_stage} decides"
    if train.data_parallel_mode == "fsdp2" and train.init_device == DOCUMENTED_INIT_DEVICE:
        yield "train.init_device", "data_parallel_mode: fsdp2 initializes on meta, which is used"
    length, multiple = data.row_length, data.pad_to_multiple_of
    if (
        is_explicitly_set(run, "data.pad_to_multiple_of")
        and not data.is_non_default("pad_to_multiple_of")
        and length % multiple
    ):
        yield (
            "data.pad_to_multiple_of",
            f"does not divide sample_packing_sequence_len ({length}): full sequences are padded"
            " beyond it",
        )


def _left_out(run: RunConfig, name: str) -> RunConfig:
    section, field = name.split(".")
    before = cast(ConfigSection, getattr(run, section))
    values = {key: getattr(before, key) for key in before.model_fields_set - {field}}
    # It validates nothing again, and takes exactly these for the fields that are set.
    after = type(before).model_construct(**values)
    return run.model_copy(update={section: after})
