"""Early stopping and best-checkpoint tracking."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.schema.checkpoint import SaveBestConfig
from penstock.config.schema.duration import EarlyStoppingConfig
from penstock.config.schema.evaluation import metric_sign
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError


@dataclass
class EarlyStopping:
    """Receives every evaluation of a run, in order."""

    by: SaveBestConfig
    """How the best checkpoint is chosen."""
    until: EarlyStoppingConfig
    """When to stop early."""
    best: Mapping[str, Any] | None = None
    """The evaluation record of the best checkpoint."""
    _reached: float | None = None
    """The best value that early stopping has seen."""
    _waited: int = 0
    """Evaluations since then without improvement."""

    @classmethod
    def of(cls, train: TrainConfig) -> "EarlyStopping":
        """Build from the config."""
        return cls(train.save_best, train.early_stopping)

    def require(self, names: Collection[str]) -> None:
        """Raise ConfigError for a metric that is not in `names`, the metrics of evaluations."""
        asked = {"save_best": self.by.metric}
        if self.until.patience:
            asked["early_stopping"] = self.until.metric
        for setting, metric in asked.items():
            if metric is not None and metric not in names:
                told = ", ".join(sorted(names)) or "nothing: no row is held out"
                raise ConfigError(
                    f"train.{setting}.metric is {metric}, which no evaluation of this run tells.\n"
                    f"  Evaluations tell {told}."
                )

    def is_best(self, record: Mapping[str, Any]) -> bool:
        """Whether this evaluation is better than the best so far."""
        metric = self.by.metric
        if metric is None or (value := record.get(metric)) is None:
            return False
        sign = metric_sign(metric, self.by.mode)
        if self.best is None:
            return not math.isnan(value)
        return sign * value > sign * self.best[metric]

    def update(self, record: Mapping[str, Any]) -> None:
        """Update the early-stopping state with an evaluation."""
        if not self.until.patience or (value := record.get(self.until.metric)) is None:
            return
        value *= metric_sign(self.until.metric)
        bar = -math.inf if self._reached is None else self._reached + self.until.min_delta
        if value > bar:
            self._reached, self._waited = value, 0
        else:
            self._waited += 1

    @property
    def should_stop(self) -> bool:
        """Whether the number of evaluations without improvement exceeds the patience."""
        return bool(self.until.patience) and self._waited >= self.until.patience

    def as_json(self) -> dict[str, Any]:
        """The state for a checkpoint; empty if disabled."""
        if self.by.metric is None and not self.until.patience:
            return {}
        best = dict(self.best) if self.best else None
        return {"judged": {"best": best, "reached": self._reached, "waited": self._waited}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `as_json`, if present."""
        if judged := state.get("judged"):
            self.best = judged["best"]
            self._reached, self._waited = judged["reached"], judged["waited"]


def needed_by(state: Mapping[str, Any]) -> list[int]:
    """The step of the best checkpoint as of this `state.json`, if it is another checkpoint."""
    best = (state.get("judged") or {}).get("best")
    return [best["step"]] if best and best["step"] != state["step"] else []
