"""Which evaluation is the best so far, and whether a run should go on after those it has seen."""

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
    """Hears every evaluation of a run, in order."""

    by: SaveBestConfig
    """How the best is told."""
    until: EarlyStoppingConfig
    """When to give up."""
    best: Mapping[str, Any] | None = None
    """The record of the evaluation whose checkpoint is kept as the best."""
    _reached: float | None = None
    """The best value that `until` has heard of."""
    _waited: int = 0
    """Evaluations since then."""

    @classmethod
    def of(cls, train: TrainConfig) -> "EarlyStopping":
        """What the settings say."""
        return cls(train.save_best, train.early_stopping)

    def require(self, names: Collection[str]) -> None:
        """Raise ConfigError for a metric that is none of `names`, which evaluations tell."""
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
        """Whether this evaluation is better than the best one."""
        metric = self.by.metric
        if metric is None or (value := record.get(metric)) is None:
            return False
        sign = metric_sign(metric, self.by.mode)
        if self.best is None:
            return not math.isnan(value)
        return sign * value > sign * self.best[metric]

    def hear(self, record: Mapping[str, Any]) -> None:
        """Take note of an evaluation, for `is_tired`."""
        if not self.until.patience or (value := record.get(self.until.metric)) is None:
            return
        value *= metric_sign(self.until.metric)
        bar = -math.inf if self._reached is None else self._reached + self.until.min_delta
        if value > bar:
            self._reached, self._waited = value, 0
        else:
            self._waited += 1

    @property
    def is_tired(self) -> bool:
        """Whether too many evaluations in a row were no better."""
        return bool(self.until.patience) and self._waited >= self.until.patience

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; empty where nobody asks."""
        if self.by.metric is None and not self.until.patience:
            return {}
        best = dict(self.best) if self.best else None
        return {"judged": {"best": best, "reached": self._reached, "waited": self._waited}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `as_json` made, if it is there."""
        if judged := state.get("judged"):
            self.best = judged["best"]
            self._reached, self._waited = judged["reached"], judged["waited"]


def needed_by(state: Mapping[str, Any]) -> list[int]:
    """The step of the best checkpoint until the one with this `state.json`, where it is another."""
    best = (state.get("judged") or {}).get("best")
    return [best["step"]] if best and best["step"] != state["step"] else []
