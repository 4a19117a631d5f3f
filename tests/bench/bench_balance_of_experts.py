"""What looking at routers costs: `python -m tests.bench.bench_balance_of_experts`.

One small Qwen3-MoE is trained without router metrics, with them, and with a load-balancing loss of
rows and of whole steps, in turns of one process. Printed are medians of five CPU times of a step of
four micro-batches, and their ratio to the first. Figures go to docs/benchmarks/cpu.md.
"""

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.engine.distributed.ranks import init_process_group
from penstock.train.launch.job import Job
from tests.bench.data.packed import write_rows
from tests.bench.pages import write_section
from tests.engine import runs
from tests.engine.loops import loop_of, step

TITLE = "MoE load balancing: time of a step"
ROW, VOCABULARY, STEPS = 1024, 320, 5
MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": ROW,
}
WAYS: dict[str, dict[str, Any]] = {
    "no metrics, no loss": {"log_router_stats": False},
    "metrics only": {},
    "balancing loss per sequence": {"moe_aux_loss_coef": 1e-3},
    "balancing loss per step": {"moe_aux_loss_coef": 1e-3, "moe_global_load_balancing": True},
}


def job(folder: Path, name: str) -> Job:
    """A run of one process that asks this of routers."""
    run = runs.run_config(
        folder / name,
        folder / "model",
        data={"sample_packing_sequence_len": ROW},
        data_parallel_mode="none",
        **WAYS[name],
    )
    return runs.job_of(run, folder / "packed")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = 4 * (STEPS + 1)
        write_rows(folder / "packed", num_rows=rows, row=ROW, document=256, vocabulary=VOCABULARY)
        runs.write_config(folder / "model", **MODEL)
        ranks = init_process_group(60)
        loops = {way: loop_of(job(folder, way), ranks) for way in WAYS}
        for loop in loops.values():
            step(loop)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(STEPS):
            for way, loop in loops.items():
                started = time.process_time()
                step(loop)
                times[way].append(time.process_time() - started)
        for loop in loops.values():
            loop.close()
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    lines = [
        f"{way:28} {seconds:6.2f} s {seconds / medians['no metrics, no loss']:6.2f}"
        for way, seconds in medians.items()
    ]
    print("\n".join(lines))
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
    shape = (
        "2 layers with 64 experts of width 128, of which a token takes 8; width 512; four rows of "
        f"{ROW} tokens, one at a time; fp32, layers recomputed."
    )
    command = "CPU seconds of a step. Written by `tests/bench/bench_balance_of_experts.py`."
    write_section("cpu", TITLE, [command, "", machine, shape, "", "```", *lines, "```"])


if __name__ == "__main__":
    main()
