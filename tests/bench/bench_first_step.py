"""Time to the first step: `python -m tests.bench.bench_first_step [--rounds N] [--chats N]`.

Seconds from `penstock train CONFIG` to the first step in metrics.jsonl, of the quickstart's model
and N chats: cold, where data is prepared and packed first; with both cached; and of a run that was
killed after a checkpoint, to the first step after it. Beside them transformers' Trainer on the same
data, which it tokenizes, to the end of its first step, and to that after a checkpoint. Ways take
turns. Imports are most of it, and other work on the machine shows; processor seconds are those of
all processes until then.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.bench.child_processes import family_of
from tests.bench.figures import record
from tests.conftest import ROOT

SAVED = 2
"""Steps before the checkpoint."""

DEADLINE = 300
POLL_SECONDS = 0.005
TICKS = os.sysconf("SC_CLK_TCK")

Waited = Callable[[], bool]


def write_chats(file: Path, count: int) -> None:
    """Sums of two numbers."""
    with file.open("w") as sink:
        for number in range(count):
            a, b = number % 97, number * 31 % 89
            user = {"role": "user", "content": f"{a}+{b}="}
            messages = [user, {"role": "assistant", "content": str(a + b)}]
            sink.write(json.dumps({"messages": messages}) + "\n")


def until(command: Sequence[str], is_there: Waited) -> tuple[float, float]:
    """Seconds and processor seconds from the start of a command until something is there; then all
    of its processes are killed."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        while not is_there():
            if process.poll() is not None and not is_there():
                assert process.stdout
                raise SystemExit(f"ended before its first step:\n{process.stdout.read()[-2000:]}")
            if time.perf_counter() - started > DEADLINE:
                raise SystemExit(f"no step in {DEADLINE} s: {' '.join(command)}")
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        return seconds, sum(map(_processor_seconds, family_of(process.pid)))
    finally:
        for pid in reversed(family_of(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _processor_seconds(pid: int) -> float:
    """Of a process and of those of its children that ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


def ours(folder: Path, data: Path, name: str) -> list[str]:
    """A run of this name, whose data other names share."""
    return [
        str(Path(sys.executable).with_name("penstock")),
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        f"--data.datasets.0.path={data}",
        f"--data.dataset_prepared_path={folder / 'data'}",
        "--data.val_set_size=0",
        f"--train.output_dir={folder / name}",
        f"--train.save_steps={SAVED}",
        "--train.num_train_epochs=50",
    ]


def theirs(folder: Path, data: Path) -> list[str]:
    """The Trainer on these chats."""
    module = "tests.bench.peer_first_step"
    return [sys.executable, "-m", module, str(data), str(folder / "peer"), str(SAVED)]


def steps_in(folder: Path, since: float = 0.0) -> int:
    """The last step in a metrics.jsonl that was written after this time; 0 if there is none."""
    last = 0
    for file in _named("metrics.jsonl", folder):
        if file.stat().st_mtime <= since:
            continue
        lines = file.read_text().splitlines(keepends=True)
        steps = [json.loads(line).get("step", 0) for line in lines if line.endswith("\n")]
        last = max([last, *steps])
    return last


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint; 0 if there is none."""
    names = [file.parent.name for file in _named("COMPLETE", folder)]
    steps = [name.removeprefix("global_step_") for name in names]
    # One that is being written has another ending.
    return max([0, *(int(step) for step in steps if step.isdecimal())])


def measure(folder: Path, data: Path) -> dict[str, tuple[float, float]]:
    """(seconds, processor seconds) of each way."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run, resumed, steps = folder / "a", folder / "b", folder / "peer" / "steps"
    taken = {"cold": until(ours(folder, data, "a"), lambda: steps_in(run) > 0)}
    taken["transformers, cold"] = until(theirs(folder, data), steps.exists)
    taken["cached"] = until(ours(folder, data, "b"), lambda: steps_in(resumed) > 0)
    until(ours(folder, data, "b"), lambda: saved_step(resumed) > 0)
    # Of records after the checkpoint the run that goes on keeps none.
    last = saved_step(resumed)
    before = max(file.stat().st_mtime for file in _named("metrics.jsonl", resumed))
    taken["resumed"] = until(
        ours(folder, data, "b"), lambda: steps_in(resumed, since=before) > last
    )
    checkpoint = folder / "peer" / f"checkpoint-{SAVED}" / "trainer_state.json"
    until(theirs(folder, data), checkpoint.exists)
    steps.unlink(missing_ok=True)
    taken["transformers, resumed"] = until(theirs(folder, data), steps.exists)
    return taken


def _named(name: str, folder: Path) -> list[Path]:
    # Unlike `Path.rglob` it does not mind folders that vanish.
    return [Path(path) / name for path, _, files in os.walk(folder) if name in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=2000)
    asked = parser.parse_args()
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as made:
        data = Path(made) / "chats.jsonl"
        write_chats(data, asked.chats)
        rounds += [measure(Path(made) / "runs", data) for _ in range(asked.rounds)]
    medians = {
        name: tuple(statistics.median(way[name][part] for way in rounds) for part in (0, 1))
        for name in rounds[0]
    }
    for name, (seconds, processor) in medians.items():
        record(f"{name}: first step", seconds, "s")
        print(f"{name:24} {seconds:6.2f} s   {processor:6.2f} processor s")
    for name in ("cold", "resumed"):
        ratio = medians[f"transformers, {name}"][1] / medians[name][1]
        print(f"{name}: transformers / ours {ratio:.2f} in processor seconds")


if __name__ == "__main__":
    main()
