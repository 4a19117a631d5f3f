"""How far a training run is, from the records it leaves while it goes on."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.files import read_json
from penstock.train.report.format import amount, duration, number

RECENT = 50
"""Steps whose pace says when the run will end."""


class TrainingProgress:
    """What of a run's records people look for while it goes on."""

    def __init__(self) -> None:
        self.step = 0
        """Steps that are done; 0 before anything is known."""
        self.is_ended = False
        """Whether there will be no more of them."""
        self._total: int | None = None
        self._last: Mapping[str, Any] = {}
        self._last_eval: Mapping[str, Any] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """The next record of metrics.jsonl."""
        if "eval_loss" in record:
            self._last_eval = record
        if "loss" not in record:
            return
        if record["step"] <= self.step:
            self._recent.clear()  # ranks that were started again have gone back
        self.step, self._last = record["step"], record
        self._recent.append((record["step"], record["time"]))

    def read_total(self, surroundings: Path) -> None:
        """Know the number of steps that the run has written there, if it has."""
        if surroundings.is_file():
            self._total = read_json(surroundings)["total_steps"]

    @property
    def percent(self) -> float:
        """The share of its steps that the run has taken: all, once it ended, if early."""
        if self.is_ended:
            return 100.0
        return min(100.0, 100 * self.step / self._total) if self._total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end, if steps take as long as the last ones; None if not known yet."""
        (first, began), (last, now) = self._recent[0], self._recent[-1]
        if not self._total or first == last:
            return None
        return max(0, self._total - last) * (now - began) / (last - first)

    @property
    def summary(self) -> str:
        """One line."""
        told = f"step {self._steps}, loss {number(self._last['loss'])}"
        if self.is_ended:
            return f"{told}, ended"
        return (
            told
            if self.seconds_left is None
            else f"{told}, about {duration(self.seconds_left)} left"
        )

    @property
    def line(self) -> str:
        """One line for a log: the last step."""
        last = self._last
        told = [f"step {self._steps}: loss {number(last['loss'])}", f"lr {number(last['lr'])}"]
        if "grad_norm" in last:
            told.append(f"grad norm {number(last['grad_norm'])}")
        told.append(f"{amount(last['tokens_per_second'])} tokens/s")
        if self.seconds_left is not None:
            told.append(f"about {duration(self.seconds_left)} left")
        return ", ".join(told)

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
