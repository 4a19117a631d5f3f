"""What it costs to recompute and to move activations, step by step.

`python -m tests.bench.bench_recompute`

A small dense Qwen3 on one process: nothing, parts of layers or whole ones are computed again, and
what is kept stays or is moved to host memory. And a small Qwen3-MoE, whose experts two processes
share, with the proportions of Qwen3-30B-A3B: an expert is 3/8 as wide as the model, and a token
takes eight. The ways take turns in the same process. Printed are the most bytes that tensors made
in a step take at the same time, what else the way is about, and the median seconds of five steps.
Figures go to docs/benchmarks/cpu.md.
"""

import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from penstock.train.launch.job import Job
from tests.bench.activations import Cost, measured
from tests.bench.data.packed import write_rows
from tests.bench.pages import write_section
from tests.engine import runs
from tests.ranks import on_ranks

PARTS = "Activation checkpointing and offload"
MIXTURES = "Activation checkpointing of MoE layers"
RANKS, ROW, VOCABULARY, LAYERS = 2, 1024, 512, 4
DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2 * LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SPARSE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
AWAY = {"enable_activation_offload": True}
NOTHING = {"enable_gradient_checkpointing": False}
WAYS_OF_PARTS = {
    "nothing recomputed": NOTHING,
    "attention recomputed": {"recompute_modules": ["self_attn"]},
    "MLP recomputed": {"recompute_modules": ["mlp"]},
    "attention and MLP recomputed": {"recompute_modules": ["self_attn", "mlp"]},
    "whole layers recomputed": {},
    "whole layers recomputed, reentrant": {"enable_reentrant": True},
    "nothing recomputed, all offloaded": {**NOTHING, **AWAY},
    "nothing recomputed, all but 20 MB offloaded": {
        **NOTHING,
        **AWAY,
        "activation_gpu_limit": 0.02,
    },
    "whole layers recomputed, inputs offloaded": AWAY,
}
WAYS_OF_MIXTURES = {
    "nothing recomputed": NOTHING,
    "whole layers recomputed": {},
    "moe_checkpoint_method: moe_act": {"moe_checkpoint_method": "moe_act"},
}
"""What is computed again."""


def jobs(
    folder: Path, model: dict[str, Any], ways: dict[str, dict[str, Any]], **train: Any
) -> dict[str, Job]:
    """A run for each way."""
    runs.write_config(folder / "model", **model)
    made = {}
    for name, way in ways.items():
        run = runs.run_config(
            folder / name,
            folder / "model",
            data={"sample_packing_sequence_len": ROW},
            enable_mixed_precision=True,
            max_steps=10,
            **train,
            **way,
        )
        made[name] = runs.job_of(run, folder.parent / "packed")
    return made


def alike(found: dict[str, Cost]) -> dict[str, Cost]:
    """What was found, of ways that are the same work."""
    assert len({cost.loss for cost in found.values()}) == 1, "they must be the same work"
    return found


def line_of_part(name: str, cost: Cost) -> str:
    """Of the table of parts."""
    return (
        f"{name:44} {cost.peak / 2**20:8.1f} MiB {cost.moved / 2**20:7.1f} MiB offloaded "
        f"{statistics.median(cost.seconds):7.2f} s"
    )


def line_of_mixture(name: str, cost: Cost) -> str:
    """Of the table of mixtures."""
    return (
        f"{name:14} {cost.peak / 2**20:8.1f} MiB {cost.exchanges:5} exchanges "
        f"{cost.sent / 2**20:7.1f} MiB sent {statistics.median(cost.seconds):7.2f} s"
    )


def write(title: str, shape: str, lines: list[str]) -> None:
    """Print a table, and write it down."""
    print("\n".join([title, *lines]))
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
    command = "Written by `tests/bench/bench_recompute.py`."
    write_section("cpu", title, [command, "", machine, shape, "", "```", *lines, "```"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "packed", num_rows=24, row=ROW, document=200, vocabulary=VOCABULARY)
        one = {"data_parallel_mode": "none", "global_batch_size": 1}
        made = jobs(folder / "dense", DENSE, WAYS_OF_PARTS, **one)
        found = alike(on_ranks(1, measured, made, timeout=900, collectives="plain")[0])
        shape = (
            f"{2 * LAYERS} layers of width 256, feed-forward 768; a row of {ROW} tokens on one "
            "process; bf16. What is offloaded is copied to memory that is not counted."
        )
        write(PARTS, shape, [line_of_part(way, cost) for way, cost in found.items()])
        both = {"expert_parallel_size": RANKS, "global_batch_size": RANKS}
        made = jobs(folder / "sparse", SPARSE, WAYS_OF_MIXTURES, **both)
        found = alike(on_ranks(RANKS, measured, made, timeout=900, collectives="plain")[0])
        shape = (
            f"{LAYERS} layers with 16 experts of width 96, of which a token takes 8; width 256; a "
            f"row of {ROW} tokens on each of {RANKS} processes, which share the experts; bf16, "
            "fsdp2."
        )
        write(MIXTURES, shape, [line_of_mixture(way, cost) for way, cost in found.items()])


if __name__ == "__main__":
    main()
