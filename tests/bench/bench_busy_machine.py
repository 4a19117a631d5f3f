"""Training on a busy CPU: `python -m tests.bench.bench_busy_machine [--steps 30] [--rounds 3]`.

Tokens per second of the quickstart's training, alone and beside as many single-threaded busy
processes as there are processors, with idle OpenMP threads that wait as Penstock has them wait and
as libgomp does by default. All four take turns in each round, every other one backwards; medians
and ratios are printed. On two processors that are otherwise quiet it takes some six minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITING = {"ours": {}, "libgomp's default": {"GOMP_SPINCOUNT": "300000"}}
GOALS = {"alone": 0.95, "busy": 4.0}
"""What ours is to be of libgomp's default, at least."""
SKIPPED = 10
"""Steps that are not counted: the first ones allocate."""


def tokens_per_second(steps: int, environment: dict[str, str], prepared: Path) -> float:
    """The median over the steps of one training run, whatever the caller says of waiting."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "train.output_dir": folder,
            "train.max_steps": str(steps),
            "data.dataset_prepared_path": str(prepared),
        }
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("penstock")), "train"),
                "configs/quickstart.yaml",
                *(word for name, value in options.items() for word in (f"--{name}", value)),
            ],
            cwd=ROOT,
            env={**kept, **environment},
            check=True,
            capture_output=True,
        )
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        told = [one["tokens_per_second"] for one in records if "tokens_per_second" in one]
    return statistics.median(told[SKIPPED:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    # They end with this process, however it ends.
    spin = [
        sys.executable,
        "-c",
        "import os\nhere = os.getppid()\nwhile os.getppid() == here: pass",
    ]
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as prepared:
        for number in range(asked.rounds):
            for place, count in (("alone", 0), ("busy", os.cpu_count() or 1)):
                for waiting, environment in list(WAITING.items())[:: -1 if number % 2 else 1]:
                    others = [subprocess.Popen(spin) for _ in range(count)]
                    try:
                        rate = tokens_per_second(asked.steps, environment, Path(prepared))
                    finally:
                        for other in others:
                            other.kill()
                            other.wait()
                    found.setdefault((place, waiting), []).append(rate)
    for place in ("alone", "busy"):
        ours, theirs = (statistics.median(found[place, waiting]) for waiting in WAITING)
        print(
            f"{place:6} ours {ours:8.0f} tok/s   default {theirs:8.0f}   {ours / theirs:6.2f} x"
            f" (goal {GOALS[place]:g})"
        )


if __name__ == "__main__":
    main()
