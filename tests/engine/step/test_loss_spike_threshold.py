"""The config decides how far a loss must stand out to be told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.train_step import StepResult
from penstock.rows.collate import MicroBatch
from penstock.train.metrics.step_metrics import StepMetrics


@pytest.mark.parametrize(("threshold", "is_told"), [(0.0, False), (6.0, True), (1e6, False)])
def test_a_loss_is_told_from_the_threshold_on_that_is_written(threshold, is_told):
    told: list[str] = []
    ranks: Any = SimpleNamespace(
        rank=0, is_main_process=False, device=torch.device("cpu"), all_gather=lambda mine: [mine]
    )
    built: Any = SimpleNamespace(config=None, learning=None)
    rows: Any = SimpleNamespace(lengths=list, squares=list)
    train = TrainConfig(output_dir="out", log_loss_spikes=threshold)
    metrics = StepMetrics(built, rows, train, ranks, lambda text, **_: told.append(text))
    empty = torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch(empty, empty, empty, (), 10, 10, ((0, 10),))
    for loss in [*(2.0 + number % 2 / 100 for number in range(30)), 5.0]:
        result = StepResult(loss, 1.0, 20, 20, {}, torch.tensor(1.0))
        metrics.step_fields(result, [batch], np.array([0]), 1.0)
    assert len(told) == is_told
