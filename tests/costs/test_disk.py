"""What is told of a run's disk, beside what a run leaves there."""

import json

import pytest

from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.estimate.costs.disk import estimate_disk
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.costs.sharded_model import ShardedModel
from tests.costs import measured
from tests.engine import runs
from tests.engine.loops import each
from tests.ranks import on_ranks
from tests.turns import one_day_in

CASES = {
    "adamw": {},
    "states in bf16": {"optimizer": "anyprecision_adamw"},
    "states in eight bits": {"ckpt_quant": "int8"},
    "states in four bits": {"optimizer": "anyprecision_adamw", "ckpt_quant": "int4"},
    "no states": {"optimizer": "sgd"},
    "adapters": {"lora": {"enable_lora": True, "lora_rank": 128}},
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
KEPT = {"max_steps": 3, "save_steps": 1, "save_total_limit": 2, "save_hf_weights": False}


@pytest.mark.dist
@one_day_in(3, of=1)
def test_checkpoints_take_what_is_told_and_as_many_are_kept(tmp_path):
    rows = measured.write_rows(tmp_path / "rows", [32, 16], 8)
    model = measured.write_model(tmp_path / "model", SMALL)
    hf = json.loads((model / "config.json").read_text())
    data = {"sample_packing_sequence_len": 64}
    jobs = {
        name: measured.job(tmp_path, name, rows, model, data=data, **KEPT, **case)
        for name, case in CASES.items()
    }
    on_ranks(1, each, runs.train_here, jobs)
    for name, job in jobs.items():
        cut = ShardedModel(job.config, build_cost_model(job.config, hf), ParallelDims(), "cpu")
        told = estimate_disk(cut, None, 3, 1.0)
        folders = list((tmp_path / name / "checkpoints").glob("global_step_*"))
        assert told.checkpoints == len(folders) == 2
        sizes = [sum(file.stat().st_size for file in folder.rglob("*")) for folder in folders]
        assert told.checkpoint == pytest.approx(max(sizes), rel=0.05), name
    # The last step is saved once, whether or not it is one of every so many.
    counts = {}
    for steps in (4, 5):
        more = {**KEPT, "max_steps": steps, "save_steps": 2, "save_total_limit": None}
        job = measured.job(tmp_path, f"all of {steps}", rows, model, data=data, **more)
        on_ranks(1, runs.train_here, job)
        cut = ShardedModel(job.config, build_cost_model(job.config, hf), ParallelDims(), "cpu")
        folders = list((tmp_path / f"all of {steps}/checkpoints").glob("global_step_*"))
        counts[steps] = (estimate_disk(cut, None, steps, 1.0).checkpoints, len(folders))
    assert counts == {4: (2, 2), 5: (3, 3)}
