"""Results of `make gpu`: a JSON file, written after each step, and the page made from it."""

import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.files import atomic_write
from tests.bench.gpu.parts import PARTS
from tests.bench.pages import write_section

KEPT_LINES = 80
"""Of what a step printed."""

RAN, OUT_OF_TIME = "ran", "ran out of time"
"""How verdicts begin."""


@dataclass(frozen=True)
class Origin:
    """When and with what something was measured."""

    date: str
    commit: str
    driver: str
    python: str
    pytorch: str

    @classmethod
    def now(cls) -> "Origin":
        """Today, with this tree on this machine."""
        import torch

        date = datetime.now(UTC).date().isoformat()
        return cls(date, _commit(), _driver(), platform.python_version(), torch.__version__)

    def __str__(self) -> str:
        return f"{self.date}, {self.commit}, driver {self.driver}, PyTorch {self.pytorch}"


@dataclass
class StepResult:
    """What came of one step."""

    verdict: str
    seconds: float
    command: str
    origin: Origin
    figures: list[dict[str, Any]] = field(default_factory=list)
    """A figure that an earlier run left has an `origin` of its own."""
    output: list[str] = field(default_factory=list)

    @property
    def ran_out_of_time(self) -> bool:
        """Whether it was ended before its own end."""
        return self.verdict.startswith(OUT_OF_TIME)

    def is_done(self, seconds: float) -> bool:
        """Whether it need not run again, now that it may take so long."""
        if self.ran_out_of_time:
            return self.seconds >= seconds - 1
        return not self.verdict.startswith("cut off")

    def with_earlier(self, earlier: "StepResult") -> "StepResult":
        """With the figures of an earlier run, if this one ended too soon to measure them again."""
        if self.verdict.startswith(RAN) and not self.ran_out_of_time:
            return self
        measured = {(one["name"], one["unit"]) for one in self.figures}
        origin = asdict(earlier.origin)
        kept = [
            {"origin": origin, **one}
            for one in earlier.figures
            if (one["name"], one["unit"]) not in measured
        ]
        return replace(self, figures=[*self.figures, *kept])


def judge(status: int | None, figures: Sequence[dict[str, Any]], output: Sequence[str]) -> str:
    """One line about a step. `status` None: it ran out of time."""
    goals = [one for one in figures if one["goal"] is not None]
    missed = [one["name"] for one in goals if not one["reached"]]
    last = next((line.strip() for line in reversed(output) if line.strip()), "no output")
    if status is None:
        how = OUT_OF_TIME
    elif status:
        how = f"FAILED with status {status}: {last[:160]}"
    else:
        how = RAN if figures else f"{RAN}: {last[:160]}"
    if goals:
        how += f"; {len(goals) - len(missed)} of {len(goals)} goals"
    return f"{how}; MISSED: {', '.join(missed)}" if missed else how


@dataclass
class Results:
    """All steps on one machine."""

    file: Path
    machine: dict[str, str]
    steps: dict[str, StepResult] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, machine: dict[str, str]) -> "Results":
        """Those in `file`. Exits where they are of another machine."""
        if not file.is_file():
            return cls(file, machine)
        stored = json.loads(file.read_text())
        if stored["machine"] != machine:
            raise SystemExit(
                f"{file} holds the results of {stored['machine']}, and this is {machine}.\n"
                "  Name another folder with --out, or remove the file."
            )
        steps = {
            name: StepResult(**{**step, "origin": Origin(**step["origin"])})
            for name, step in stored["steps"].items()
        }
        return cls(file, machine, steps)

    def add(self, name: str, result: StepResult) -> None:
        """Keep a step's result, in place of an earlier one or beside its figures."""
        earlier = self.steps.get(name)
        self.steps[name] = result.with_earlier(earlier) if earlier else result
        made = {name: asdict(step) for name, step in self.steps.items()}
        text = json.dumps({"machine": self.machine, "steps": made}, indent=1)
        with atomic_write(self.file) as part:
            part.write_text(text + "\n")

    def write_page(self, folder: Path, page: str) -> None:
        """Write the section of this machine."""
        write_section(page, self.machine["device"], self._lines(), folder)

    def _lines(self) -> list[str]:
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [f"Written by `make gpu` on {about}."]
        for part in PARTS:
            steps = {step.name: self.steps.get(step.name) for step in part.steps}
            lines += ["", f"### {part.letter}. {part.title}", ""]
            lines += [
                f"- {name}: {result.verdict} ({result.seconds:.0f} s; {result.origin})"
                if result
                else f"- {name}: not measured"
                for name, result in steps.items()
            ]
            figures = [one for result in steps.values() if result for one in result.figures]
            if figures:
                lines += ["", "| figure | value | goal | |", "|---|---|---|---|"]
                lines += [_row(one) for one in figures]
        return lines


def _row(one: dict[str, Any]) -> str:
    if "origin" in one:
        one = {**one, "name": f"{one['name']} ({Origin(**one['origin'])})"}
    goal = "" if one["goal"] is None else f"{'≤' if one['at_most'] else '≥'} {one['goal']:g}"
    shown = {None: "", True: "reached", False: "MISSED"}[one["reached"]]
    return f"| {one['name']} | {one['value']:,.4g} {one['unit']} | {goal} | {shown} |"


def describe_machine() -> dict[str, str]:
    """What results are of."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}",
        "GPUs": str(torch.cuda.device_count()) if cuda else "0",
    }


def _driver() -> str:
    """The GPU driver's version, or none."""
    if not shutil.which("nvidia-smi"):
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, check=False)
    return (shown.stdout.split() or ["unknown"])[0]


def _commit() -> str:
    """The tree's commit, or unknown without git."""
    try:
        made = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return made.stdout.strip()
