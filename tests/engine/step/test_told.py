"""What a step tells besides its loss: norms, where a fault came from, how long its phases took."""

import math
import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock.core.machine.linux import peak_memory_bytes
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.non_finite import NonFiniteReport, format_reports
from penstock.engine.optim.norm_metrics import norm_layer_name
from penstock.engine.train_step import StepResult
from penstock.rows.collate import MicroBatch
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.metrics.loss_spikes import LossSpikeDetector, LossSpikeMonitor
from penstock.train.metrics.phase_timer import PhaseTimer
from penstock.train.metrics.step_metrics import GIB
from tests.engine import runs
from tests.engine.loops import (
    before_each_update,
    each,
    gradients_of,
    loop_of,
    parameters_of,
    step,
)
from tests.ranks import on_ranks

POISON = runs.VOCAB - 1
"""A token that one packed row alone has."""
BAD_ROW = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    runs.write_rows(folder / "packed", 8)
    [file] = (folder / "packed" / "data" / "train").iterdir()
    table = pa.ipc.open_file(file.read_bytes()).read_all()
    ids = [[min(each, POISON - 1) for each in row] for row in table["input_ids"].to_pylist()]
    ids[BAD_ROW][0] = POISON
    column = pa.array(ids, type=table.schema.field("input_ids").type)
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table.set_column(0, table.schema.field("input_ids"), column))
    runs.write_config(folder / "model", tie_word_embeddings=False)
    return folder


def job(folder, name, **train):
    settings = {"max_grad_norm": 0, "micro_batch_size": 1, **train}
    run = runs.run_config(folder / name, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def norms(job):
    """What a step told, and what it should have, from whole gradients and parameters."""
    loop = loop_of(job)
    seen = before_each_update(loop, lambda: gradients_of(loop))
    record = step(loop)
    adapters = {n: v for n, v in parameters_of(loop).items() if "lora_" in n}
    trained = adapters or parameters_of(loop)
    loop.close()
    factors = sum(value.size for value in adapters.values())
    return record, by_layer(seen[0]), by_layer(trained), factors, loop.built.learning.adapter_params


def by_layer(arrays):
    squares = {}
    for name, value in arrays.items():
        layer = norm_layer_name(name)
        squares[layer] = squares.get(layer, 0.0) + float((value.astype(np.float64) ** 2).sum())
    return {layer: math.sqrt(square) for layer, square in squares.items()}


LAID = {
    "shards": {"data_parallel_shard_size": 2},
    "tensors": {"data_parallel_mode": "none", "tensor_parallel_size": 2},
    "stages": {"data_parallel_mode": "none", "pipeline_parallel_size": 2},
    "adapters": {"data_parallel_shard_size": 2, "lora": {"enable_lora": True}},
}


@pytest.mark.dist
@pytest.mark.slow
def test_norms_by_layer_are_those_of_whole_tensors_in_every_layout(folder):
    asked = {"log_grad_norm": "layers", "log_param_norm": "layers"}
    jobs = {name: job(folder, name, **layout, **asked) for name, layout in LAID.items()}
    for found in on_ranks(2, each, norms, jobs):
        for name, (record, gradients, parameters, factors, counted) in found.items():
            order = ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
            there = [layer for layer in order if layer in gradients]
            assert list(record["grad_norms"]) == list(record["param_norms"]) == there, name
            assert record["grad_norms"] == pytest.approx(gradients, rel=1e-5), name
            assert record["param_norms"] == pytest.approx(parameters, rel=1e-5), name
            for whole, parts in (("grad_norm", gradients), ("param_norm", parameters)):
                assert record[whole] == pytest.approx(math.hypot(*parts.values()), rel=1e-5), name
            assert counted == factors, name


def records(job):
    loop = loop_of(job)
    found = step(loop)
    loop.close()
    return {name: value for name, value in found.items() if "norm" in name}


@pytest.mark.dist
def test_norms_are_told_as_far_as_is_asked(folder):
    asked = {
        "neither": {"log_grad_norm": False},
        "as it comes": {},
        "both": {"log_param_norm": True},
    }
    jobs = {
        name: job(folder, name, data_parallel_mode="none", **each) for name, each in asked.items()
    }
    [found] = on_ranks(1, each, records, jobs)
    assert {name: list(told) for name, told in found.items()} == {
        "neither": [],
        "as it comes": ["grad_norm"],
        "both": ["grad_norm", "param_norm"],
    }
    assert found["both"]["grad_norm"] == pytest.approx(found["as it comes"]["grad_norm"], rel=1e-6)


def poisoned(job):
    """What is said when one row's tokens have no numbers."""
    loop = loop_of(job)
    for local_param in loop.built.engine.model.params:
        if local_param.name == "model.embed_tokens.weight":
            local_param.parameter.data[POISON] = math.nan
    steps = [
        [
            (number, rank)
            for rank, rows in enumerate(loop.ranks.all_gather(groups))
            for number in rows
        ]
        for groups in ([row for group in each for row in group] for each in loop._steps())
    ]
    [(at, rank)] = [
        (at, rank) for at, each in enumerate(steps, 1) for row, rank in each if row == BAD_ROW
    ]
    try:
        loop.run()
    except Exception as error:  # noqa: BLE001 - carried home
        return at, rank, str(error)
    return None


@pytest.mark.dist
def test_a_number_that_is_not_finite_is_traced_to_its_rank_step_and_row(folder):
    ways = {
        "copies": {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2},
    }
    jobs = {name: job(folder, f"bad {name}", **layout) for name, layout in ways.items()}
    for found in on_ranks(2, each, poisoned, jobs):
        for at, rank, said in found.values():
            assert f"the gradient norm of step {at} is nan" in said
            assert f"On rank {rank} the loss of packed row(s) {BAD_ROW} is nan" in said
            assert "parameter with such a gradient is model." in said


def test_an_overflow_on_the_way_back_names_the_rows_of_the_step():
    fine = NonFiniteReport((), 0.0, None, (4, 9))
    said = format_reports([fine, NonFiniteReport((), 0.0, "model.norm.weight", (7,))])
    assert "packed row(s) are 4, 7, 9" in said
    assert "model.norm.weight (rank 1)" in said


def test_a_loss_stands_out_once_and_only_from_many():
    watch = LossSpikeDetector(6.0)
    usual = [2 + 0.01 * math.sin(i) for i in range(60)]
    assert not any(map(watch.update, [50.0, *usual]))
    spike = watch.update(3.0)
    assert spike
    assert spike.median == pytest.approx(2, abs=0.02)
    assert watch.update(3.1) is None  # the same one
    assert watch.update(2.0) is None
    assert watch.update(math.inf)
    assert not any(map(watch.update, [2.0, 2.2]))
    assert not any(map(LossSpikeDetector(0).update, [*usual, 1e9]))


def test_losses_that_are_nearly_zero_do_not_stand_out_for_being_many_times_their_median():
    watch = LossSpikeDetector(6.0)
    falling = [5.8 * 0.93**step for step in range(200)]
    assert not any(map(watch.update, falling))
    assert not any(map(watch.update, [0.01, 0.12, 0.01, 0.15, 0.01]))
    assert watch.update(0.6)


def spike(rank_with_the_spike):
    """What is said on this rank of a step that was dear on one of them."""
    ranks = init_process_group(60)
    watch = LossSpikeMonitor(6.0, ranks)
    empty = torch.zeros(0, dtype=torch.int64)

    def see(loss, share):
        batch = MicroBatch(empty, empty, empty, (), 10, 10, ((10 + ranks.rank, 10),))
        result = StepResult(loss, 1.0, 20, 20, {}, torch.tensor(share))
        return watch.update(result, [batch])

    assert not any(see(2.0 + i % 2 / 100, 1.0) for i in range(30))
    found = see(5.0, 4.0 if ranks.rank == rank_with_the_spike else 1.0)
    return found and (found.text, found.spike.as_json())


@pytest.mark.dist
def test_a_spike_is_traced_to_its_rank_and_rows_and_all_ranks_say_so():
    one, other = on_ranks(2, spike, 1)
    assert one == other
    text, numbers = one
    assert "the loss is 5" in text
    assert "on rank(s) 1, 1.60 times the mean, with packed row(s) 11" in text
    assert numbers["loss"] == 5.0
    assert numbers["usual"] == pytest.approx(2.005, abs=0.01)


FORWARD, BACKWARD = 0.02, 0.04
"""Seconds that a part of a model needs for a micro-batch, at least."""
BALLAST = 300 << 20


def slowed(job):
    """The last record of a run in which passes take their time, and the most memory that this rank
    has had; the second one has some more."""
    loop = loop_of(job)

    def wait(_module, _given, output):
        time.sleep(FORWARD)
        if output.requires_grad:
            output.register_hook(lambda _: time.sleep(BACKWARD))

    for part in loop.built.engine.model.parts:
        part.register_forward_hook(wait)
    ballast = b"x" * (BALLAST * loop.ranks.rank)
    loop.run()
    assert len(ballast) == BALLAST * loop.ranks.rank
    return list(read_metrics(job.output_dir / "metrics.jsonl"))[-1], peak_memory_bytes() / GIB


@pytest.mark.dist
@pytest.mark.slow
def test_a_record_tells_passes_apart_and_the_rank_with_the_most_memory(folder):
    layouts = {"shards": {}, "stages": {"pipeline_parallel_size": 2}}
    jobs = {name: job(folder, name, max_steps=2, **its) for name, its in layouts.items()}
    first, second = on_ranks(2, each, slowed, jobs)
    for name, micro_batches in {"shards": 2, "stages": 4}.items():
        (record, least), (_, most) = first[name], second[name]
        phases, seconds = record["phases"], record["seconds"]
        assert phases["forward"] >= micro_batches * FORWARD
        assert phases["backward"] >= micro_batches * BACKWARD
        # The last stage alone works on the first micro-batch.
        bubble = phases.get("bubble", 0.0)
        assert bubble >= FORWARD + BACKWARD if name == "stages" else bubble == 0
        assert phases["forward"] + phases["backward"] + bubble <= seconds
        assert record["memory_rank"] == 1
        assert least < record["memory_gib"] <= most + 1e-4


def test_phases_add_up_to_the_time_that_has_passed_and_waiting_is_within_them():
    pulse, phases = Heartbeat(), PhaseTimer(torch.device("cpu"))
    pulse.set_listener(phases.on_phase)
    began = time.perf_counter()
    phases.pop_seconds()
    pulse.set_phase("reading rows")
    time.sleep(0.02)
    pulse.set_phase("update")
    time.sleep(0.01)
    with pulse.waiting():
        time.sleep(0.03)
    found = phases.pop_seconds()
    passed = time.perf_counter() - began
    assert found["data"] >= 0.02
    assert found["optimizer"] >= 0.04
    assert 0.03 <= found["communication"] < found["optimizer"]
    parts = sum(seconds for phase, seconds in found.items() if phase != "communication")
    assert parts == pytest.approx(passed, abs=0.005)
    time.sleep(0.01)
    pulse.set_phase("saving")
    assert phases.pop_seconds()["between"] >= 0.01
