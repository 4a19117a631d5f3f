"""The progress of a training run, from the records that it writes."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.files import read_json
from penstock.train.report.format import amount, duration, number

RECENT = 50
"""Number of recent steps from which the remaining time is estimated."""


class TrainingProgress:
    """Progress, remaining time and latest metrics of a run."""

    def __init__(self) -> None:
        self.step = 0
        """Completed steps; 0 if unknown."""
        self.is_ended = False
        """Whether the run has ended."""
        self._total: int | None = None
        self._last: Mapping[str, Any] = {}
        self._last_eval: Mapping[str, Any] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Add the next record of metrics.jsonl."""
        if "eval_loss" in record:
            self._last_eval = record
        if "loss" not in record:
            return
        if record["step"] <= self.step:
            self._recent.clear()  # restarted ranks have resumed from an earlier step
        self.step, self._last = record["step"], record
        self._recent.append((record["step"], record["time"]))

    def read_total(self, surroundings: Path) -> None:
        """Read the total number of steps from the run's environment file, if it exists."""
        if surroundings.is_file():
            self._total = read_json(surroundings)["total_steps"]

    @property
    def percent(self) -> float:
        """Completed steps in percent; 100 once the run has ended, even if early."""
        if self.is_ended:
            return 100.0
        return min(100.0, 100 * self.step / self._total) if self._total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end, from the recent steps; None if not known yet."""
        (first, began), (last, now) = self._recent[0], self._recent[-1]
        if not self._total or first == last:
            return None
        return max(0, self._total - last) * (now - began) / (last - first)

    @property
    def summary(self) -> str:
        """One line for the description of an artifact."""
        parts = f"step {self._steps}, loss {number(self._last['loss'])}"
        if self.is_ended:
            return f"{parts}, ended"
        return (
            parts
            if self.seconds_left is None
            else f"{parts}, about {duration(self.seconds_left)} left"
        )

    @property
    def line(self) -> str:
        """One line for a log: the last step."""
        last = self._last
        parts = [f"step {self._steps}: loss {number(last['loss'])}", f"lr {number(last['lr'])}"]
        if "grad_norm" in last:
            parts.append(f"grad norm {number(last['grad_norm'])}")
        parts.append(f"{amount(last['tokens_per_second'])} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"about {duration(self.seconds_left)} left")
        return ", ".join(parts)

    @property
    def table(self) -> str:
        """A table in Markdown."""
        lines = (f"| {name} | {value} |" for name, value in self._rows())
        return "\n".join(["| training | |", "| --- | --- |", *lines])

    @property
    def _steps(self) -> str:
        return f"{self.step:,} of {self._total:,}" if self._total else f"{self.step:,}"

    def _rows(self) -> list[tuple[str, str]]:
        last = self._last
        rows = [
            ("step", f"{self._steps} ({self.percent:.1f}%)"),
            ("loss", number(last["loss"])),
        ]
        if self.seconds_left is not None and not self.is_ended:
            rows.append(("left, about", duration(self.seconds_left)))
        if self._last_eval:
            held = self._last_eval
            rows.append(("held-out loss", f"{number(held['eval_loss'])} (step {held['step']:,})"))
        rows += [
            ("learning rate", number(last["lr"])),
            ("epoch", f"{last['epoch']:.2f}"),
            ("tokens per second", amount(last["tokens_per_second"])),
        ]
        return rows
