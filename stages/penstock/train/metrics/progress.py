"""Progress display on stderr of rank 0."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tqdm import tqdm

from penstock.core import env

Style = Literal["progress_bar", "structured", "json"]

RECENT = 50
"""Number of recent steps for the ETA."""


def build_progress(
    style: Style, total: int, done: int, every: int = 1
) -> "_ProgressBar | _LogLines":
    """The display of `train.log_format`: `show` displays a record, of every `every`-th step and the
    last one, and `say` a message."""
    if style == "progress_bar":
        return _ProgressBar(total, done, every)
    return _LogLines(total, done, every, json.dumps if style == "json" else _format_fields)


class _TqdmBar(tqdm):
    """A tqdm bar that is not redrawn on close, which would repeat it in a log."""

    last_text = ""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        text = str(self) if msg is None else msg
        if text != self.last_text:
            self.last_text = text
            super().display(text, pos)

    def clear(self, nolock: bool = False) -> None:
        # `tqdm.write` clears the bar and draws it again (tqdm 4.70), mostly with the same text.
        self.last_text = ""
        super().clear(nolock)


class _ProgressBar:
    """A progress bar on one line, cut to the terminal width. The launcher may have to pass the
    width: a longer line would wrap on each update."""

    def __init__(self, total: int, done: int, every: int) -> None:
        self._every, self._eta, self._total = every, _EtaEstimator(done, total), total
        width = env.num_columns()
        self._bar = _TqdmBar(
            total=total,
            # Steps of earlier starts count for the bar, and not for tqdm's rate.
            initial=done,
            desc="train",
            # Some terminals wrap a line that fills them.
            ncols=width and width - 1,
            dynamic_ncols=width is None,
            mininterval=0.5,
            bar_format="{desc} {percentage:3.0f}% {bar:16} {n_fmt}/{total_fmt}{postfix}",
        )

    def show(self, record: Mapping[str, Any]) -> None:
        if "loss" not in record:
            # Losses by data set, eval_loss/NAME, would fill the line.
            names = [name for name in record if name.startswith("eval_") and "/" not in name]
            if fields := ", ".join(f"{name} {_format_value(record[name])}" for name in names):
                self.say(f"train: step {record['step']}: {fields}")
            return
        eta = self._eta.eta(record["step"])
        if record["step"] % self._every == 0 or record["step"] == self._total:
            # By default each call draws the bar at once, whatever `mininterval` is.
            self._bar.set_postfix_str("  ".join(_bar_fields(record, eta)), refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class _LogLines:
    """One line per record."""

    def __init__(
        self, total: int, done: int, every: int, format_record: Callable[[Mapping[str, Any]], str]
    ) -> None:
        self._total, self._every, self._format_record = total, every, format_record
        self._eta = _EtaEstimator(done, total)

    def show(self, record: Mapping[str, Any]) -> None:
        more: dict[str, Any] = {"total_steps": self._total}
        if "loss" in record:
            step = record["step"]
            more["eta_seconds"] = round(self._eta.eta(step), 1)
            if step % self._every and step != self._total:
                return
        self.say(self._format_record({**record, **more}))

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.flush()


class _EtaEstimator:
    """The ETA, extrapolated from recent steps."""

    def __init__(self, done: int, total: int) -> None:
        self._total = total
        self._recent: deque[tuple[int, float]] = deque([(done, time.monotonic())], maxlen=RECENT)

    def eta(self, step: int) -> float:
        """Remaining seconds after `step` steps."""
        now = time.monotonic()
        first, then = self._recent[0]
        self._recent.append((step, now))
        return max(0, self._total - step) * (now - then) / max(1, step - first)


def format_clock(seconds: float) -> str:
    """Format as H:MM:SS, with days if necessary."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes:02}:{secs:02}"


def _bar_fields(record: Mapping[str, Any], eta: float) -> list[str]:
    """The most important values first; narrow terminals cut off the rest."""
    loss = record["loss"]
    first = "no loss" if loss is None else f"loss {loss:.4f}"
    fields = [first, f"ETA {format_clock(eta)}", f"lr {record['lr']:.2e}"]
    if "grad_norm" in record:
        fields.append(f"norm {record['grad_norm']:.2f}")
    fields.append(f"{record['tokens_per_second']:,.0f} tok/s")
    if record.get("mfu") is not None:
        fields.append(f"MFU {record['mfu']:.1%}")
    if "memory_gib" in record:
        fields.append(f"{record['memory_gib']:.1f} GiB")
    return fields


def _format_fields(record: Mapping[str, Any]) -> str:
    # Per-layer values are only for plots.
    plain = {name: value for name, value in record.items() if not isinstance(value, dict | list)}
    return " ".join(f"{name}={_format_value(value)}" for name, value in plain.items())


def _format_value(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
