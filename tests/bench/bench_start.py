"""How long Penstock takes to do nothing: `python -m tests.bench.bench_start [CONFIG]`.

Medians of nine: importing the package, `--help`, and `penstock run` on a finished pipeline, beside
the import of what the stages need when there is work. Seconds are the processor's, which other
programs on the machine hardly change. CONFIG defaults to the quickstart, which is run first unless
it is done.
"""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 9


def median_seconds(*command: str) -> float:
    """The median processor time of the command, in a process of its own each time."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        started = _used()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        seconds.append(_used() - started)
    return statistics.median(seconds)


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    config = sys.argv[1] if len(sys.argv) > 1 else "configs/quickstart.yaml"
    python, penstock = sys.executable, str(Path(sys.executable).with_name("penstock"))
    subprocess.run([penstock, "run", config], cwd=ROOT, check=True)
    measured = {
        "import penstock": (median_seconds(python, "-c", "import penstock"), 0.15),
        "penstock --help": (median_seconds(penstock, "--help"), 0.16),
        "penstock run, finished": (median_seconds(penstock, "run", config), 0.35),
    }
    bare = median_seconds(python, "-c", "")
    heavy = median_seconds(python, "-c", "import torch, transformers, prefect")
    for what, (seconds, goal) in measured.items():
        share = seconds / heavy
        print(f"{what:24} {seconds:6.3f} s   goal {goal} s   {share:5.1%} of the heavy imports")
    print(f"{'the interpreter alone':24} {bare:6.3f} s")
    print(f"{'torch, transformers, prefect':24} {heavy:6.3f} s")


if __name__ == "__main__":
    main()
