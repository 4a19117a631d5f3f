"""Memory and seconds of a step as `penstock plan` tells them, beside what they come to.

    python -m tests.bench.bench_plan

Memory is what the system counts beyond the process itself, at its highest in three steps. Seconds
are medians of five steps, on one processor whose speed is measured between them.
"""

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from penstock.estimate.costs.device_speed import build_cpu_machine
from penstock.estimate.costs.durations import estimate_step
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.costs.measure_machine import measure
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.models.flops import Work
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import Job
from tests.costs.cases import CASES
from tests.costs.test_memory import compare, jobs_of
from tests.engine.loops import loop_of, step
from tests.ranks import on_ranks

STEPS = 5


def main() -> None:
    """Print the table."""
    titles = f"{'predicted':>11}{'measured':>11}{'ratio':>7}"
    print(f"{'case':20}{titles}{titles}")
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            told, most = compare(Path(folder) / "memory", name)
            line = f"{name:20} {told / 1e6:7.0f} MB {most / 1e6:7.0f} MB {told / most:6.2f}"
            _, job, world = jobs_of(Path(folder) / "time", name)
            if world == 1:
                [(wanted, taken)] = on_ranks(1, seconds, job)
                line += f" {wanted:8.2f} s {taken:8.2f} s {wanted / taken:6.2f}"
            print(line, flush=True)


def seconds(job: Job) -> tuple[float, float]:
    """Of a step: predicted, and taken."""
    train = job.config.train.model_copy(update={"max_steps": STEPS + 1})
    loop = loop_of(replace(job, config=job.config.model_copy(update={"train": train})))
    step(loop)
    taken: list[float] = []
    speeds = []
    for _ in range(STEPS):
        speeds.append(measure())
        started = time.perf_counter()
        step(loop)
        taken.append(time.perf_counter() - started)
    names = ("fp32", "bf16", "bandwidth")
    here = {name: statistics.median(speed[name] for speed in speeds) for name in names}
    config = json.loads((Path(str(job.config.model.config_path)) / "config.json").read_text())
    cut = ShardedModel(job.config, build_cost_model(job.config, config), loop.built.dims, "cpu")
    row = PackedRows(job.packed_dir / "data" / "train").row(0)
    logits = int((row.labels >= 0).sum())
    work = Work.from_lengths(cut.config, row.lengths.tolist(), logits=logits)
    told = estimate_step(cut, build_cpu_machine(here, 1), work)
    assert told
    return told.total, statistics.median(taken)


if __name__ == "__main__":
    # By its own name: ranks import what they run.
    from tests.bench import bench_plan

    bench_plan.main()
