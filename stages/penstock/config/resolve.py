"""What settings that are unset, or that repeat one another, come to.

An unset setting is null, so a config that is printed with every field means what it meant before.
The functions are properties of the sections; this lists their answers under the settings' names.
"""

from typing import Any

from penstock.config.schema.data import LONGEST_ROW
from penstock.config.schema.run import RunConfig


def resolve(run: RunConfig) -> dict[str, Any]:
    """The resolved value of each such setting, by its name; texts for what data decide."""
    data, train, lora = run.data, run.train, run.lora
    resolved = {
        "data.sample_packing_sequence_len": data.sample_packing_sequence_len
        or f"chosen from the samples, up to {LONGEST_ROW}",
        "data.dataloader_drop_last": LAST_BATCH[data.last_batch],
        "data.dataloader_num_workers": data.num_workers,
        "data.dataloader_prefetch_factor": data.prefetch_factor,
        "train.precision": train.resolved_precision,
        "train.master_weights": train.keeps_in == "float32",
        "pipeline.stages": list(run.stages),
    }
    if train.data_parallel_mode == "fsdp2":
        resolved["train.zero_stage"] = train.resolved_zero_stage
        resolved["train.init_device"] = train.init_device or "meta"
    if train.pipeline_parallel_size > 1:
        resolved["train.pipeline_parallel_virtual_stages"] = train.resolved_virtual_stages
    if lora.enable_qlora:
        resolved["lora.quant_group_size"] = lora.resolved_group_size or "a scale for each row"
    return resolved


LAST_BATCH = {
    "drop": True,
    "keep": False,
    "drop_few": "true where it loses at most 5 % of an epoch",
}
