"""Documented defaults that a run cannot use as they stand.

A setting that is written with its documented default asks for no more than one that is left out. So
where the default does not go with the rest of the run, it is read as if it were left out, and one
line says what is used instead. Any other value that does not fit is refused by the rules.
"""

from collections.abc import Iterator
from typing import cast

from penstock.config.loading.fault import shown
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig, is_explicitly_set

DOCUMENTED_INIT_DEVICE = "cuda"


def with_usable_defaults(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run with every unusable documented default left out, and a line for each of them.

    `lora.enable_qlora: true` implies `lora.enable_lora: true`.
    """
    notices: list[str] = []
    for name, instead in _unusable(run):
        value = getattr(getattr(run, name.split(".")[0]), name.split(".")[1])
        notices.append(f"{name}: {shown(value)} is the documented default, and {instead}")
        run = _left_out(run, name)
    if is_explicitly_set(run, "data.pad_to_multiple_of") and not run.data.asks_for(
        "pad_to_multiple_of"
    ):
        run = _left_out(run, "data.pad_to_multiple_of")
    if run.lora.enable_qlora and not run.lora.enable_lora:
        lora = run.lora.model_copy(update={"enable_lora": True})
        run = run.model_copy(update={"lora": lora})
    return run, notices


def _unusable(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings written with documented defaults that do not fit, and what is used instead."""
    lora, train, data = run.lora, run.train, run.data
    if lora.enable_qlora and not lora.enable_lora and is_explicitly_set(run, "lora.enable_lora"):
        yield "lora.enable_lora", "enable_qlora: true trains adapters: true is used"
    groups = GROUPS[lora.quant_format]
    if (
        lora.enable_qlora
        and is_explicitly_set(run, "lora.quant_group_size")
        and not lora.asks_for("quant_group_size")
        and lora.quant_group_size not in groups
    ):
        has = f"groups of {groups[0]}" if groups else "one scale for each row"
        yield "lora.quant_group_size", f"{lora.quant_format} has {has}, which is used"
    if train.data_parallel_mode == "fsdp2" and train.init_device == DOCUMENTED_INIT_DEVICE:
        yield "train.init_device", "data_parallel_mode: fsdp2 starts from meta, which is used"
    length, multiple = data.sample_packing_sequence_len, data.pad_to_multiple_of
    if (
        is_explicitly_set(run, "data.pad_to_multiple_of")
        and not data.asks_for("pad_to_multiple_of")
        and length % multiple
    ):
        yield (
            "data.pad_to_multiple_of",
            f"does not divide sample_packing_sequence_len ({length}): a full row is padded beyond"
            " it",
        )


def _left_out(run: RunConfig, name: str) -> RunConfig:
    """The run as if the setting had not been written."""
    section, field = name.split(".")
    before = cast(ConfigSection, getattr(run, section))
    values = {key: getattr(before, key) for key in before.model_fields_set - {field}}
    after = type(before).model_construct(**values)
    return run.model_copy(update={section: after})
