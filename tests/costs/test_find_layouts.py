"""Layouts that are proposed: each can be run, fits, and is in its place."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from penstock.config.loading.load import loads
from penstock.engine.distributed.parallel_dims import ParallelDims, build_parallel_dims
from penstock.engine.distributed.validate_layout import ModelDims, layout_errors
from penstock.estimate.costs.device_speed import find_machine
from penstock.estimate.costs.durations import estimate_forward, estimate_step
from penstock.estimate.costs.estimate import USABLE_MEMORY, build_cost_model, predict
from penstock.estimate.costs.find_layouts import LayoutSearch, find_fastest_layouts
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.estimate.costs.token_counts import Data, estimate_work
from penstock.models.flops import Work, forward_flops, step_flops
from tests.config.values import smallest

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
DENSE = AutoConfig.for_model("qwen3", **SIZES).to_dict()
SPARSE = AutoConfig.for_model(
    "qwen3_moe", **SIZES, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=1024
).to_dict()
ROWS = 24


def wanted(hf, devices, memory=80e9, **sections):
    run = loads(smallest(data={"sample_packing_sequence_len": 4096}, **sections))
    machine = replace(find_machine("H100"), memory=memory)
    return LayoutSearch(
        run, build_cost_model(run, hf), ModelDims.of(hf), machine, devices, ROWS, None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hf", "devices"),
    [(DENSE, 1), (DENSE, 6), (DENSE, 8), (SPARSE, 4)],
    ids=["dense on one", "dense on six", "dense on eight", "experts on four"],
)
def test_proposals_run_fit_and_come_in_order(hf, devices):
    asked = wanted(hf, devices)
    proposals = find_fastest_layouts(asked)
    assert proposals
    for one in proposals:
        run = loads(smallest(data={"sample_packing_sequence_len": 4096}, train=dict(one.settings)))
        assert not layout_errors(run, devices, asked.counts)
        assert build_parallel_dims(run.train, devices) == one.prediction.degrees
        assert one.prediction.rows_per_step == ROWS
        assert one.prediction.memory.total <= USABLE_MEMORY * 80e9
    seconds = [one.prediction.step.total for one in proposals if one.prediction.step]
    assert seconds == sorted(seconds)
    assert len({one.prediction.degrees for one in proposals}) == len(proposals)


@pytest.mark.slow
def test_less_memory_asks_for_more_cuts_or_recomputing_and_none_is_proposed_without_enough():
    [roomy, *_] = find_fastest_layouts(wanted(DENSE, 8, memory=80e9))
    [tight, *_] = find_fastest_layouts(wanted(DENSE, 8, memory=8e9))
    assert roomy.prediction.memory.total > 8e9
    assert tight.prediction.memory.total <= USABLE_MEMORY * 8e9
    assert roomy.prediction.step
    assert tight.prediction.step
    assert roomy.prediction.step.total < tight.prediction.step.total
    assert find_fastest_layouts(wanted(DENSE, 2, memory=4e9)) == []


def test_products_take_the_time_of_their_operations_shared_by_all_ranks():
    asked = wanted(DENSE, 4, train={"global_batch_size": ROWS})
    machine, config = asked.machine, asked.model.config
    work = Work.from_lengths(config, [512] * 8 * ROWS)
    flops = step_flops(config, work)
    for recomputes in (True, False):
        train = asked.run.train.model_copy(update={"enable_gradient_checkpointing": recomputes})
        run = asked.run.model_copy(update={"train": train})
        step = estimate_step(
            ShardedModel(run, asked.model, ParallelDims(shard=4), "cuda"), machine, work
        )
        again = forward_flops(config, work, parts=["attention", "network"]) if recomputes else 0
        speed = machine.speed(2)
        assert step
        assert speed
        assert step.products == pytest.approx((flops + again) / 4 / speed)
    assert (
        estimate_step(
            ShardedModel(asked.run, asked.model, ParallelDims(shard=4), "cuda"),
            replace(machine, speeds={}),
            work,
        )
        is None
    )


PAIRS = {
    "data": {
        "sample_packing_sequence_len": 4096,
        "datasets": [{"path": "pairs", "type": "preference"}],
    }
}


def comparing(loss):
    """A run of that loss over four shards, and a step's work."""
    run = loads(
        smallest(
            **PAIRS,
            train={"objective": "preference", "global_batch_size": ROWS},
            preference={"loss_type": loss},
        )
    )
    asked = wanted(DENSE, 4)
    return run, asked.model, asked.machine, Work.from_lengths(asked.model.config, [512] * 8 * ROWS)


def test_a_baseline_costs_one_more_pass_forward_in_every_step():
    steps = {}
    for loss in ("sigmoid", "kto_pair"):
        run, model, machine, work = comparing(loss)
        cut = ShardedModel(run, model, ParallelDims(shard=4), "cuda")
        steps[loss] = estimate_step(cut, machine, work)
        once, speed = estimate_forward(cut, machine, work), machine.speed(2)
        assert once
        assert speed
        assert once.products == pytest.approx(forward_flops(model.config, work) / 4 / speed)
        assert once.optimizer == 0
        assert 0 < once.communication < steps[loss].communication
        assert 0 < once.memory < steps[loss].memory
    more = steps["kto_pair"].total - steps["sigmoid"].total
    assert more == pytest.approx(once.total)


def test_a_reference_is_told_as_one_pass_over_all_rows_where_there_is_one():
    data = Data((240,), 240 * 4096, 240 * 8, 240 * 2048, "counted")
    for loss, has_one in (("sigmoid", True), ("simpo", False)):
        run, model, machine, _ = comparing(loss)
        found = predict(run, model, ParallelDims(shard=4), machine, data)
        if not has_one:
            assert found.reference_seconds is None
            continue
        assert found.step
        assert found.reference_seconds
        work = estimate_work(model.config, run, data, ROWS)
        once = estimate_forward(
            ShardedModel(run, model, ParallelDims(shard=4), machine.kind), machine, work
        )
        assert once
        assert found.reference_seconds == pytest.approx(once.total * 240 / ROWS)
        # Three passes are learnt from, and one more is made anew.
        assert found.step.total * 240 / ROWS / 5 < found.reference_seconds
        assert found.reference_seconds < found.step.total * 240 / ROWS / 3


def test_a_pipeline_waits_for_as_many_micro_batches_as_it_has_other_ranks():
    train = {"pipeline_parallel_size": 4, "global_batch_size": ROWS}
    asked = wanted(DENSE, 4, train=train)
    work = Work.from_lengths(asked.model.config, [4096] * ROWS)
    step = estimate_step(
        ShardedModel(asked.run, asked.model, ParallelDims(pipeline=4), "cuda"), asked.machine, work
    )
    assert step
    others = step.products + step.memory + step.communication
    assert step.bubble == pytest.approx(others * 3 / ROWS)


def test_split_matrices_send_four_sums_of_the_stream_for_each_layer():
    asked = wanted(
        DENSE,
        2,
        train={
            "tensor_parallel_size": 2,
            "global_batch_size": 2,
            "data_parallel_mode": "none",
            "enable_gradient_checkpointing": False,
        },
    )
    work = Work.from_lengths(asked.model.config, [4096] * 2)
    step = estimate_step(
        ShardedModel(asked.run, asked.model, ParallelDims(tensor=2), "cuda"), asked.machine, work
    )
    # Two ranks send and receive the whole stream once for each sum, forward and backward.
    stream = 4096 * SIZES["hidden_size"] * 2
    sent = 2 * SIZES["num_hidden_layers"] * 4 * stream
    assert step
    assert step.communication == pytest.approx(sent / asked.machine.link)


def test_ranks_that_share_tokens_exchange_heads_in_layers_of_linear_attention():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    layers = {"layer_types": ["linear_attention"] * 12 + ["full_attention"] * 4}
    asked = wanted(AutoConfig.for_model("qwen3_5_text", **SIZES, **sizes, **layers).to_dict(), 4)
    work = Work.from_lengths(asked.model.config, [4096])
    run = asked.run.model_copy(
        update={"train": asked.run.train.model_copy(update={"data_parallel_mode": "none"})}
    )
    step = estimate_forward(
        ShardedModel(run, asked.model, ParallelDims(ring=4), "cuda"), asked.machine, work
    )
    assert step
    # Keys and queries for each of 6 heads, and 2 empty ones: a rank has 2, and gives 3 of 4 tokens.
    exchanged = 4096 * 2 * (2 * 128 + 2 * 128 + 2) * 2 * 3 / 4
    # Keys and values of a quarter of the tokens; most of it overlaps.
    passed = 0.3 * 3 * 1024 * 2 * SIZES["num_key_value_heads"] * 128 * 2
    assert step.communication == pytest.approx((12 * exchanged + 4 * passed) / asked.machine.link)
