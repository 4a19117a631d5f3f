"""What recomputing mixtures costs: `PYTHONPATH=. python tests/bench/bench_recompute.py`.

Two processes share the experts of a small Qwen3-MoE, with the proportions of Qwen3-30B-A3B: an
expert is 3/8 as wide as the model, and a token takes eight. Nothing, whole layers or only the gates
of experts are computed again, in turns of the same process. Printed are the most bytes that tensors
made in a step take at the same time, the all-to-alls of rows in a step with what they send, and the
median seconds of five steps. Figures go to docs/benchmarks/cpu.md.
"""

import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch
from tests.bench.activations import Cost, measured
from tests.bench.packed import write_rows
from tests.bench.pages import write_section
from tests.engine import runs
from tests.ranks import on_ranks

from penstock.train.job import Job

TITLE = "Recomputation of mixtures: cpu"
RANKS, ROW, VOCABULARY, LAYERS = 2, 1024, 512, 4
MODEL = {
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
WAYS = {
    "nothing": {"enable_gradient_checkpointing": False},
    "whole layers": {},
    "moe_act": {"moe_checkpoint_method": "moe_act"},
}
"""What is computed again."""


def job(folder: Path, name: str) -> Job:
    """A run that computes this again."""
    run = runs.run_config(
        folder / name,
        folder / "model",
        data={"sample_packing_sequence_len": ROW},
        expert_parallel_size=RANKS,
        enable_mixed_precision=True,
        global_batch_size=RANKS,
        max_steps=10,
        **WAYS[name],
    )
    return runs.job_of(run, folder / "packed")


def line(name: str, cost: Cost) -> str:
    """Of the table."""
    seconds = statistics.median(cost.seconds)
    return (
        f"{name:14} {cost.peak / 2**20:8.1f} MiB {cost.exchanges:5} exchanges "
        f"{cost.sent / 2**20:7.1f} MiB sent {seconds:7.2f} s"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "packed", num_rows=24, row=ROW, document=200, vocabulary=VOCABULARY)
        runs.write_config(folder / "model", **MODEL)
        jobs = {way: job(folder, way) for way in WAYS}
        found = on_ranks(RANKS, measured, jobs, timeout=900, collectives="plain")[0]
    assert len({cost.loss for cost in found.values()}) == 1, "they must be the same work"
    lines = [line(way, cost) for way, cost in found.items()]
    print("\n".join(lines))
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
    shape = (
        f"{LAYERS} layers with 16 experts of width 96, of which a token takes 8; width 256; a row "
        f"of {ROW} tokens on each of {RANKS} processes, which share the experts; bf16, fsdp2."
    )
    command = "Written by `tests/bench/bench_recompute.py`."
    write_section("cpu", TITLE, [command, "", machine, shape, "", "```", *lines, "```"])


if __name__ == "__main__":
    main()
