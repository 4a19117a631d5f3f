"""What being told costs a step: `python -m tests.bench.bench_logging`.

The quickstart's model is trained on rows like its own, in one process, with all that is told by
itself and with norms by layer besides. Printed are medians over steps: of a whole step, and of what
of it goes into measuring (phases, operations, memory, spikes, norms) and telling (metrics.jsonl, a
line on stderr), each timed where it is called; and their share. Times are those of the processor in
the thread that trains, so that others on the machine do not count. The goal is 1 %. Figures go to
docs/benchmarks/cpu.md.
"""

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from penstock.config.loading.load import loads
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.optim.norm_metrics import Norms
from penstock.train.trainer import Trainer
from tests.bench.data.packed import write_rows
from tests.bench.pages import write_section
from tests.engine import runs
from tests.engine.loops import loop_of

TITLE = "Logging overhead"
GOAL = 0.01
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
STEPS, ROW, VOCABULARY = 24, 1024, 259
WAYS: dict[str, dict[str, Any]] = {
    "default metrics": {},
    "gradient and weight norms by layer": {"log_grad_norm": "layers", "log_param_norm": "layers"},
}


def loop_in(folder: Path, name: str) -> Trainer:
    """The quickstart, opened up before its first step."""
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["train"] |= {
        "output_dir": str(folder / name),
        "max_steps": STEPS,
        "lr": 1e-3,
        "log_format": "structured",
        "use_wandb": False,
        "report_interval": 0,
        **WAYS[name],
    }
    run = loads(settings)
    return loop_of(runs.job_of(run, folder / "packed"), init_process_group(600))


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Add the time of every call of a method to the last of `spent`."""
    call: Callable[..., Any] = getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            spent[-1] += time.thread_time() - began

    setattr(owner, name, wrapped)


def measured(loop: Trainer) -> tuple[float, float]:
    """Medians of the seconds of a step and of telling."""
    spent, steps = [0.0], list[float]()
    loop._open()
    timed(loop, "_log", spent)
    timed(loop.measures, "step_fields", spent)
    timed(loop.measures, "peak_memory", spent)
    timed(loop.measures, "reserved_memory", spent)
    if norms := loop.built.engine.part(Norms):
        timed(norms, "finish", spent)
        timed(norms, "gradient_norm", spent)
    for _ in range(STEPS):
        spent.append(0.0)
        began = time.thread_time()
        record = loop._step()
        loop._log({**record, **loop.measures.memory_fields(*loop._memory)})
        steps.append(time.thread_time() - began)
    loop.close()
    warm = STEPS // 4
    return statistics.median(steps[warm:]), statistics.median(spent[1 + warm :])


def main() -> None:
    lines = [
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}; `tests/bench/bench_logging.py`. The goal is {GOAL:.0%} for the "
        "default metrics. Norms by layer include that of all gradients, which every step computes.",
        "",
        "| logged | a step | of it measuring and logging | share |",
        "|---|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "packed", num_rows=16, row=ROW, document=60, vocabulary=VOCABULARY)
        threads = torch.get_num_threads()
        for way in WAYS:
            loop = loop_in(folder, way)
            torch.set_num_threads(threads)
            step, telling = measured(loop)
            lines.append(
                f"| {way} | {step * 1e3:.1f} ms | {telling * 1e6:.0f} µs | {telling / step:.2%} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")
    write_section("cpu", TITLE, lines)


if __name__ == "__main__":
    main()
