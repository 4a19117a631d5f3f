"""ERNIEKit's layout: how a model is cut over ranks."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.translate.dialect import Rule, no_effect, put, truth
from penstock.config.translate.translation import Entry


def _at_least_one(ranks: int) -> int:
    return max(1, ranks)


def _pipeline_words(entry: Entry) -> None:
    options = str(entry.value).split()
    if {"disable_p2p_cache_shape", "enable_clear_every_step_cache"} & set(options):
        entry.put("train.pp_variable_seq_lengths", True)
    else:
        entry.no_effect("ways to overlap or release, which change no result")


SPLIT = "train.pipeline_parallel_split"


def _segments(entry: Entry) -> None:
    """Boundaries count the embedding as their first layer, and have one entry more than stages."""
    value: Any = entry.value
    bounds = [int(number) for number in re.findall(r"\d+", str(value))]
    if isinstance(value, list) or str(value).strip().startswith("["):
        entry.put(SPLIT, [max(0, bound - 1) for bound in bounds[:-1]])
    else:
        entry.put(SPLIT, "uniform")


def _virtual(entry: Entry) -> None:
    if entry.value > 1:
        entry.put("train.pipeline_parallel_schedule", "Interleaved1F1B")
        entry.put("train.pipeline_parallel_virtual_stages", entry.value)
    else:
        entry.no_effect("every rank has one stage")


def _tail(entry: Entry) -> None:
    if not entry.value or entry.get("pipeline_parallel_degree", 1) <= 1:
        entry.no_effect("is off" if not entry.value else "there is one pipeline stage")
    elif str(entry.get("pp_seg_method", "")).strip().startswith("["):
        entry.no_effect("pp_seg_method lists the layers of each stage")
    else:
        entry.put("train.pipeline_parallel_output_weight", 1 + entry.value)
        entry.explain("empty layers take the place of layers in the split, and compute nothing")


def _sharding(entry: Entry) -> None:
    options = str(entry.value).split()
    stages = [int(option[-1]) for option in options if re.fullmatch(r"stage[123]", option)]
    if stages:
        entry.put("train.data_parallel_mode", "fsdp2")
        entry.put("train.zero_stage", stages[0])
    else:
        entry.put("train.data_parallel_mode", "ddp")
    if "offload" in options:
        entry.put("train.optimizer_offload", "cpu")


def _shards(entry: Entry) -> None:
    if entry.value > 0 and "stage" not in str(entry.get("sharding", "")):
        entry.no_effect("sharding names no stage, so nothing is sharded")
    else:
        entry.put("train.data_parallel_shard_size", entry.value if entry.value > 0 else -1)


def _experts(entry: Entry) -> None:
    group = str(entry.value)
    sizes = {
        "mp": entry.get("tensor_parallel_degree", 1),
        "data": entry.get("sharding_parallel_degree", 1),
        "dp": entry.get("sharding_parallel_degree", 1),
        "dummy": 1,
    }
    if group not in sizes:
        entry.refuse(f"it takes {', '.join(sizes)}")
        return
    entry.put("train.expert_parallel_size", max(1, sizes[group]))
    if group in ("data", "dp") and sizes[group] < 1:
        entry.approximated("experts are on every rank; write expert_parallel_size to share them")


DISPATCHES = {"v2", "alltoall", "allgather", "unpad", "text", ""}
"""Words of which their names of a dispatch are made."""


def _dispatch(entry: Entry) -> None:
    options = set(str(entry.value).split("-"))
    if not options <= DISPATCHES:
        entry.refuse("it takes v2-alltoall-unpad, v2-alltoall, v2-allgather-unpad, v2-allgather")
        return
    entry.put("model.ep_dispatch", "alltoall")
    if "alltoall" in options:
        entry.explain("tokens travel to the ranks of their experts, without padding")
    else:
        entry.explain("tokens travel by all-to-all, which gives the same result")


LAYOUT: Mapping[str, Rule] = {
    "tensor_parallel_degree": put("train.tensor_parallel_size", _at_least_one),
    "tensor_parallel_config": no_effect(
        "ranks compute the same of what they all hold, and overlapping changes nothing"
    ),
    "pipeline_parallel_degree": put("train.pipeline_parallel_size", _at_least_one),
    "pipeline_parallel_config": _pipeline_words,
    "pp_seg_method": _segments,
    "virtual_pp_degree": _virtual,
    "add_tail_layers": _tail,
    "sharding": _sharding,
    "sharding_parallel_degree": _shards,
    "sequence_parallel": truth("train.sequence_parallel"),
    "moe_group": _experts,
    "moe_multimodal_dispatch_use_allgather": _dispatch,
}
