"""How far a run is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.rows.batches import Cursor


@dataclass
class Position:
    """Everything of it that can be told in a few numbers."""

    cursor: Cursor
    """Where in the data the next step begins."""
    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float | None = None
    rows: int = 0
    """Packed rows that were trained on."""

    def as_json(self) -> dict[str, Any]:
        """As `state.json` of a checkpoint has it."""
        return {
            "step": self.step,
            "epoch": self.cursor.epoch,
            "samples_consumed": self.cursor.samples,
            "order_seed": self.cursor.seed,
            "group": self.cursor.group,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "loss": self.loss,
            "rows": self.rows,
        }

    @classmethod
    def of_json(cls, state: Mapping[str, Any]) -> "Position":
        """What `as_json` made."""
        names = ("epoch", "samples_consumed", "order_seed", "group")
        rest = {name: state[name] for name in ("step", "tokens", "trained_tokens", "loss")}
        cursor = Cursor(*(state[name] for name in names))
        return cls(cursor, **rest, rows=state.get("rows", 0))
