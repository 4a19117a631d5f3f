"""What a person sees while training runs; the leading rank's stderr only."""

import sys
from typing import Any, Literal, Protocol

from tqdm import tqdm


class Progress(Protocol):
    """Shows steps as they end."""

    def show(self, record: dict[str, Any]) -> None:
        """One logged step."""

    def close(self) -> None:
        """No more steps."""


def progress(style: Literal["progress_bar", "structured"], total: int, done: int) -> Progress:
    """The display that `train.log_format` names."""
    return _Bar(total, done) if style == "progress_bar" else _Lines(total)


class _Bar:
    def __init__(self, total: int, done: int) -> None:
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            desc="train",
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def show(self, record: dict[str, Any]) -> None:
        self._bar.set_postfix_str(
            f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  norm {record['grad_norm']:.2f}  "
            f"{record['tokens_per_second']:,.0f} tok/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total

    def show(self, record: dict[str, Any]) -> None:
        # What is told of each layer is for plots.
        plain = {name: value for name, value in record.items() if not isinstance(value, dict)}
        fields = " ".join(f"{name}={_short(value)}" for name, value in plain.items())
        sys.stderr.write(f"{fields} total_steps={self._total}\n")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.flush()


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
