"""DPO on real pairs of answers: the model comes to tell them apart, also those it has not seen."""

from pathlib import Path

import pytest

from penstock.train.metrics.jsonl import read_metrics
from tests.pipeline.runs import outcome, penstock, write_run

DEMO = Path(__file__).parents[3] / "shared" / "data" / "preference" / "dpo_en_demo.json"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not DEMO.is_file(), reason="needs ../shared/data/preference")
def test_margins_and_accuracy_rise_on_pairs_that_are_held_out(tmp_path):
    config = write_run(
        tmp_path,
        data={
            "datasets": [
                {"path": str(DEMO), "type": "preference", "max_seq_len": 1024, "max_samples": 200}
            ],
            "val_set_size": 40,
            "sample_packing_sequence_len": 2048,
            "sample_packing_method": "multipack",
        },
        train={
            "objective": "preference",
            "lr": 3.0e-4,
            "lr_warmup_ratio": 0.1,
            "global_batch_size": 4,
            "num_train_epochs": 1,
            "eval_at_start": True,
            "eval_at_end": True,
        },
    )
    stages = outcome(penstock("train", config, "--json"))["stages"]
    assert [stage["stage"] for stage in stages] == ["prepare", "pack", "reference", "train"]
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    before, after = (record for record in records if "eval_loss" in record)
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_rewards/margins"] > 0.05
    assert after["eval_rewards/accuracies"] > 0.6
