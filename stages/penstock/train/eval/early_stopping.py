"""Early stopping and best-checkpoint tracking."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.schema.checkpoint import SaveBestConfig
from penstock.config.schema.duration import EarlyStoppingConfig
from penstock.config.schema.evaluation import metric_sign
from penstock.core.errors import ConfigError


@dataclass
class EarlyStopping:
    """Receives every evaluation of a run, in order."""

    save_best: SaveBestConfig
    """How the best checkpoint is chosen."""
    early_stopping: EarlyStoppingConfig
    """When to stop early."""
    best: Mapping[str, Any] | None = None
    """The evaluation record of the best checkpoint."""
    _best_value: float | None = None
    """The best value that early stopping has seen."""
    _num_bad_evals: int = 0
    """Evaluations since then without improvement."""

    def require_metrics(self, names: Collection[str]) -> None:
        """Raise ConfigError for a metric that is not in `names`, the metrics of evaluations."""
        metric_fields = {"save_best": self.save_best.metric}
        if self.early_stopping.patience:
            metric_fields["early_stopping"] = self.early_stopping.metric
        for setting, metric in metric_fields.items():
            if metric is not None and metric not in names:
                available = (
                    ", ".join(sorted(names)) or "no metric, because there is no evaluation data"
                )
                raise ConfigError(
                    f"train.{setting}.metric is {metric}, which evaluations of this run lack.\n"
                    f"  Evaluations report {available}."
                )

    def is_best(self, record: Mapping[str, Any]) -> bool:
        """Whether this evaluation is better than the best so far."""
        metric = self.save_best.metric
        if metric is None or (value := record.get(metric)) is None:
            return False
        sign = metric_sign(metric, self.save_best.mode)
        if self.best is None:
            return not math.isnan(value)
        return sign * value > sign * self.best[metric]

    def update(self, record: Mapping[str, Any]) -> None:
        """Update the early-stopping state with an evaluation."""
        config = self.early_stopping
        if not config.patience or (value := record.get(config.metric)) is None:
            return
        value *= metric_sign(config.metric)
        best = self._best_value
        threshold = -math.inf if best is None else best + config.min_delta
        # A NaN is never above it, so a diverged run counts as one that does not improve.
        if value > threshold:
            self._best_value, self._num_bad_evals = value, 0
        else:
            self._num_bad_evals += 1

    @property
    def should_stop(self) -> bool:
        """Whether the number of evaluations without improvement reaches the patience."""
        patience = self.early_stopping.patience
        return bool(patience) and self._num_bad_evals >= patience

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; empty if disabled."""
        if self.save_best.metric is None and not self.early_stopping.patience:
            return {}
        best = dict(self.best) if self.best else None
        return {
            "judged": {"best": best, "reached": self._best_value, "waited": self._num_bad_evals}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, if present."""
        if saved := state.get("judged"):
            self.best = saved["best"]
            self._best_value, self._num_bad_evals = saved["reached"], saved["waited"]


def required_steps(state: Mapping[str, Any]) -> list[int]:
    """Steps of other checkpoints that a checkpoint with this `state.json` needs: the best one."""
    best = (state.get("judged") or {}).get("best")
    return [best["step"]] if best and best["step"] != state["step"] else []
