"""The first hour on a GPU: `make gpu`, or `python -m tests.bench.gpu [PART ...]`.

Runs the parts in order of worth (`parts.py`), each within three minutes, every step in a process of
its own that is killed when its time is over. Each step ends with one line of verdict; results are
kept in `gpu.json` after each, and steps that are there already are not run again, so that a
run that was cut off goes on where it was. A step that dies or runs out of time keeps the figures
that it recorded, beside those of an earlier run that it did not come to. With `--dry` all of it
runs on a CPU at sizes that say nothing of speed, into a folder that is thrown away unless `--out`
names one.
"""

import argparse
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.figures import FILE, FOLDER
from tests.bench.gpu.parts import PARTS, Part, Step
from tests.bench.gpu.results import (
    KEPT_LINES,
    Origin,
    Results,
    StepResult,
    describe_machine,
    judge,
)
from tests.bench.pages import PAGES


@dataclass
class StartedStep:
    """A step's process, which may wait for `go`."""

    step: Step
    process: subprocess.Popen[str]
    go: Path | None

    def kill(self) -> None:
        """End all of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start_step(step: Step, folder: Path, *, dry: bool, ahead: bool) -> StartedStep:
    """Start its process; with `ahead` it only imports what it needs."""
    variables = {**os.environ, FOLDER: str(folder), "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    if dry:
        variables |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    go, arguments = None, step.arguments(dry=dry)
    if ahead:
        go = folder / f"{step.name.replace(' ', '-')}.go"
        go.unlink(missing_ok=True)
        python, _, *rest = arguments
        arguments = [python, "-m", "tests.bench.gpu.prestart", str(go), *rest]
    process = subprocess.Popen(
        arguments,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return StartedStep(step, process, go)


def finish_step(started: StartedStep, folder: Path, seconds: float) -> tuple[int | None, list[str]]:
    """Its status, None if it was killed after `seconds`, and the last lines of what it printed."""
    (folder / FILE).unlink(missing_ok=True)
    is_late = threading.Event()
    lines: list[str] = []

    def end() -> None:
        is_late.set()
        started.kill()

    if started.go:
        started.go.touch()
    timer = threading.Timer(seconds, end)
    timer.start()
    with started.process as process:
        assert process.stdout
        for line in process.stdout:
            print(f"    {line}", end="", flush=True)
            lines.append(line.rstrip())
        status = process.wait()
    timer.cancel()
    if started.go:
        started.go.unlink(missing_ok=True)
    return (None if is_late.is_set() else status), lines[-KEPT_LINES:]


def read_figures(file: Path) -> list[dict[str, Any]]:
    """What the step recorded, also one that was killed."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_without_result(part: Part, results: Results) -> Iterator[Step]:
    """Those to run; the others' verdicts are printed."""
    for step in part.steps:
        earlier = results.steps.get(step.name)
        if earlier and earlier.is_done(step.seconds):
            print(f"  {step.name}: {earlier.verdict} (before)", flush=True)
        else:
            yield step


def run_part(part: Part, results: Results, until: float, *, dry: bool, again: bool) -> None:
    """Run the steps that have no result, each with its imports done while the one before runs.
    `until`: when all has to be over."""
    print(f"{part.letter}. {part.title}", flush=True)
    folder = results.file.parent
    waiting = list(part.steps if again else steps_without_result(part, results))
    ahead: StartedStep | None = None
    for number, step in enumerate(waiting):
        left = until - time.monotonic()
        if left < step.seconds / 2:
            print(f"  {step.name}: left for the next run, {left:.0f} s are too few", flush=True)
            if ahead:
                ahead.kill()
            ahead = None
            continue
        current = ahead or start_step(step, folder, dry=dry, ahead=False)
        ahead = None
        if number + 1 < len(waiting) and waiting[number + 1].has_main:
            ahead = start_step(waiting[number + 1], folder, dry=dry, ahead=True)
        try:
            began = time.monotonic()
            status, output = finish_step(current, folder, min(step.seconds, left))
        except BaseException:
            current.kill()
            if ahead:
                ahead.kill()
            raise
        seconds = time.monotonic() - began
        figures = read_figures(folder / FILE)
        is_cut = status is None and seconds < step.seconds - 1
        verdict = "cut off" if is_cut else judge(status, figures, output)
        command = " ".join(step.arguments(dry=dry)[1:])
        results.add(step.name, StepResult(verdict, seconds, command, Origin.now(), figures, output))
        print(f"  {step.name}: {verdict} ({seconds:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    letters = [part.letter for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(letters)}")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--out", type=Path, help="folder of gpu.json, the page and traces")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so many")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(letters):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    machine = describe_machine()
    if machine["GPUs"] == "0" and not asked.dry:
        raise SystemExit("there is no GPU here; --dry runs all of it on a CPU, at tiny sizes")
    until = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = asked.out or (Path(thrown_away) if asked.dry else PAGES)
        folder.mkdir(parents=True, exist_ok=True)
        results = Results.open(folder / "gpu.json", machine)
        for part in PARTS:
            if not asked.parts or part.letter in asked.parts:
                run_part(part, results, until, dry=asked.dry, again=asked.again)
                results.write_page(folder, "gpu")
        print(f"results in {folder}" if folder != Path(thrown_away) else "nothing is kept")
        failed = [name for name, step in results.steps.items() if "FAILED" in step.verdict]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
