"""Settings of the layout: each must be seen to do its work, and none to change what is computed."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.distributed import data_parallel
from penstock.engine.distributed.param_shards import local
from penstock.models.decoder import Decoder
from tests.engine import runs
from tests.engine.loops import each, loop_of, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Sums in another order, and one gradient added up in bf16 (its jobs are not compared).
LOSS_ATOL, NORM_RTOL = 2e-6, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    runs.write_rows(folder / "packed", 8)
    runs.write_config(folder / "model", num_hidden_layers=4)
    return folder


class Traffic(TorchDispatchMode):
    """The messages between ranks: each operation's name, dtype and numbers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            largest = max(tensors(arguments), key=torch.Tensor.numel)
            self.seen.append((str(function), str(largest.dtype), largest.numel()))
        return function(*arguments, **(options or {}))


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def _numbers(part):
    """The layers of a pipeline stage."""
    assert isinstance(part, Decoder)
    return list(map(int, part.model.layers))


def look(job):
    """One step: what this rank holds, what passes through it, and what comes out."""
    policies = []

    def sharding(*arguments, **options):
        policies.append(options["offload_policy"])
        return fully_shard(*arguments, **options)

    fully_shard = data_parallel.fully_shard
    with patch.object(data_parallel, "fully_shard", sharding):
        loop = loop_of(job)
    layout = loop.built.engine.model
    parameters = [one.parameter for one in layout.params]
    lengths, order = set(), []
    for part in layout.parts:
        for layer in part.blocks:
            layer.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].shape[0]))
        first = next(iter(part.blocks), None)
        if first is not None and job.config.train.data_parallel_mode == "none":
            first.register_forward_pre_hook(lambda *_: order.append("F"))
            first.get_parameter("mlp.down_proj.weight").register_post_accumulate_grad_hook(
                lambda _: order.append("W")
            )
    with Traffic() as traffic:
        record = step(loop)
    sharded = [p.device_mesh for p in parameters if isinstance(p, DTensor)]
    return {
        "held": sum(local(p).numel() for p in parameters),
        "layers": [_numbers(part) for part in layout.parts],
        "shards": sharded[0]["shard"].mesh.tolist() if sharded else [],
        "lengths": sorted(lengths),
        "order": "".join(order),
        "traffic": traffic.seen,
        "offloads": {isinstance(policy, CPUOffloadPolicy) for policy in policies},
        "result": (record["loss"], record["grad_norm"]),
    }


def jobs_of(folder, wanted):
    made = {}
    for name, settings in wanted.items():
        train = {
            "data_parallel_mode": "none",
            "max_steps": 1,
            "enable_gradient_checkpointing": False,
            "data": {"pad_to_multiple_of": 8},
            **settings,
        }
        run = runs.run_config(folder / name, folder / "model", **train)
        made[name] = runs.job_of(run, folder / "packed")
    return made


FSDP = {"data_parallel_mode": "fsdp2"}
TENSOR = {"tensor_parallel_size": 2}
PIPE = {"pipeline_parallel_size": 2}
WIDE = {"data_parallel_mode": "ddp", "model": {"foundation": {"intermediate_size": 2048}}}
HALF = {"enable_mixed_precision": True}
SCHEDULES = (
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
ON_TWO = {
    "full": FSDP,
    "stage 1": {**FSDP, "zero_stage": 1},
    "stage 2": {**FSDP, "zero_stage": 2},
    "stage 3": {**FSDP, "zero_stage": 3},
    "not full": {**FSDP, "enable_full_shard": False},
    "bf16": {**FSDP, "fsdp_reduce_dtype": "bf16"},
    "reduced once": {**FSDP, "fsdp_gradient_sync": "step"},
    "offload": {**FSDP, "enable_fsdp_offload": True},
    "copies": {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2},
    "one bucket": WIDE,
    "buckets": {**WIDE, "comm_bucket_mb": 1},
    "tensor": TENSOR,
    "half": {**TENSOR, **HALF},
    "half, whole sums": {**TENSOR, **HALF, "tp_reduce_dtype": "fp32"},
    "half sums": {**TENSOR, "tp_reduce_dtype": "bf16"},
    "half sums of shares": {**TENSOR, "sequence_parallel": True, "tp_reduce_dtype": "bf16"},
    "sequence": {**TENSOR, "sequence_parallel": True},
    "whole logits": {**TENSOR, "tp_vocab_parallel_loss": False},
    "ring": {"ringattn_parallel_size": 2},
    "ulysses": {"ulysses_parallel_size": 2},
    "pipe": PIPE,
    "one length": {**PIPE, "pp_variable_seq_lengths": False},
    "listed": {**PIPE, "pipeline_parallel_split": [0, 1]},
    "heavy begin": {**PIPE, "pipeline_parallel_input_weight": 3},
    "heavy end": {**PIPE, "pipeline_parallel_output_weight": 3},
    **{name: {**PIPE, "pipeline_parallel_schedule": name} for name in SCHEDULES},
    "three stages": {
        **PIPE,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_virtual_stages": 3,
        "model": {"foundation": {"num_hidden_layers": 6}},
    },
}
EXPECTED_TO_DIFFER = {
    *("bf16", "three stages", "one bucket", "buckets", "half", "half, whole sums", "half sums"),
    "half sums of shares",
}


@pytest.fixture(scope="module")
def alone(folder):
    """One process's step."""
    [found] = on_ranks(1, each, look, jobs_of(folder, {"alone": {}}))
    return found["alone"]


@pytest.fixture(scope="module")
def on_two(folder):
    """What each of two ranks saw, by job."""
    found = on_ranks(2, each, look, jobs_of(folder, ON_TWO))
    return {name: [rank[name] for rank in found] for name in ON_TWO}


@one_day_in(3, of=1)
def test_no_setting_of_the_layout_changes_the_loss_or_the_gradients(alone, on_two):
    loss, norm = alone["result"]
    for name, ranks in on_two.items():
        for rank in ranks:
            if name not in EXPECTED_TO_DIFFER:
                assert rank["result"][0] == pytest.approx(loss, abs=LOSS_ATOL), name
                assert rank["result"][1] == pytest.approx(norm, rel=NORM_RTOL), name


def count(seen, word):
    return sum(word in name for name, _, _ in seen)


def test_gathered_weights_are_gathered_again_as_the_zero_stage_says(on_two):
    gathers = {name: count(ranks[0]["traffic"], "allgather") for name, ranks in on_two.items()}
    # Two micro-batches of four layers and a root, which is kept until it has passed backward.
    assert gathers["stage 3"] == gathers["full"] == 2 * (5 + 4)
    assert gathers["stage 2"] == gathers["not full"] == 2 * 5
    assert gathers["stage 1"] == 5


def test_gradients_are_reduced_in_each_micro_batch_or_once_as_is_written(on_two):
    scatters = {name: count(ranks[0]["traffic"], "scatter") for name, ranks in on_two.items()}
    for name in ("full", "stage 1", "stage 2", "stage 3"):
        assert scatters[name] == 2 * 5, name
    # Shards would accumulate in the dtype of the weights, or what is rounded would.
    assert scatters["bf16"] == scatters["reduced once"] == 5


def test_gradients_are_added_up_in_the_precision_that_is_written(on_two):
    def dtypes(job):
        return {dtype for name, dtype, _ in on_two[job][0]["traffic"] if "reduce_scatter" in name}

    assert dtypes("full") == {"torch.float32"}
    assert dtypes("bf16") == {"torch.bfloat16"}


def test_as_many_gradients_are_added_up_at_once_as_is_written(on_two):
    def sums(job):
        seen = on_two[job][0]["traffic"]
        return [n for name, _, n in seen if "allreduce" in name and n > 1000]

    [one], more = sums("one bucket"), sums("buckets")
    # Three matrices in each of four layers are most of it; four of them fill a bucket.
    assert one > 4 * 3 * 2048 * 32
    assert len(more) == 4
    assert sum(more) == one
    assert max(more) < (1 << 18) + 2048 * 32
    assert on_two["one bucket"][0]["result"] == on_two["buckets"][0]["result"]


def test_ranks_add_layers_up_in_the_precision_that_is_written(alone, on_two):
    def counts(job):
        seen = on_two[job][0]["traffic"]
        sums = [dtype for name, dtype, _ in seen if "reduce" in name]
        return sums.count("torch.bfloat16"), sums.count("torch.float32")

    halves, wholes = counts("half")
    # Of each of four micro-batches: in and out of two parts of four layers, and into the head.
    assert halves == 4 * (2 * 2 * 4 + 1)
    assert counts("half, whole sums") == (0, halves + wholes)
    assert counts("half sums") == counts("half")
    assert counts("half sums of shares")[0] == halves
    assert counts("tensor")[0] == 0
    for name in ("half", "half, whole sums", "half sums", "half sums of shares"):
        loss, norm = on_two[name][0]["result"]
        assert loss == pytest.approx(alone["result"][0], abs=1e-2), name
        assert norm == pytest.approx(alone["result"][1], rel=2e-2), name


def test_weights_lie_in_host_memory_if_wanted(on_two):
    assert on_two["offload"][0]["offloads"] == {True}
    assert on_two["full"][0]["offloads"] == {False}


def test_every_axis_takes_its_part(alone, on_two):
    held, [length] = alone["held"], alone["lengths"][-1:]
    for name in ("copies", "ring", "ulysses"):
        assert [rank["held"] for rank in on_two[name]] == [held, held], name
    for rank in on_two["tensor"]:
        assert held / 2 < rank["held"] < held * 0.53, "all but the norms is split"
        assert rank["lengths"][-1] == length
    for name in ("ring", "ulysses", "sequence"):
        for rank in on_two[name]:
            assert rank["lengths"][-1] == length / 2, name
    ring, ulysses = (on_two[name][0]["traffic"] for name in ("ring", "ulysses"))
    assert count(ring, "send")
    assert not count(ring, "alltoall")
    assert count(ulysses, "alltoall")
    assert not count(ulysses, "send")


def test_logits_are_gathered_only_if_wanted(on_two):
    def largest(job):
        return max(n for name, _, n in on_two[job][0]["traffic"] if "gather" in name)

    trained = largest("whole logits") // runs.VOCAB
    assert trained > 8
    assert largest("whole logits") == trained * runs.VOCAB
    # Two numbers of each token from both ranks.
    assert largest("tensor") == trained * 2 * 2


def test_layers_lie_in_stages_as_is_written(on_two):
    def layers(name):
        return [rank["layers"] for rank in on_two[name]]

    assert layers("pipe") == layers("GPipe") == [[[0, 1]], [[2, 3]]]
    assert layers("listed") == [[[0]], [[1, 2, 3]]]
    assert layers("heavy begin") == [[[0]], [[1, 2, 3]]]
    assert layers("heavy end") == [[[0, 1, 2]], [[3]]]
    assert layers("three stages") == [[[0], [3], [5]], [[1, 2], [4], []]]
    # Embedding and head count for a layer each.
    assert layers("Interleaved1F1B") == [[[0], [3]], [[1, 2], []]]
    assert layers("ZBVZeroBubble") == [[[0], []], [[1, 2], [3]]]


def test_micro_batches_pass_in_the_order_of_the_schedule(on_two):
    orders = {name: [rank["order"] for rank in on_two[name]] for name in ("pipe", *SCHEDULES)}
    assert orders["GPipe"] == ["FFFFWWWW", "FFFFWWWW"]
    assert orders["pipe"] == ["FFWFWFWW", "FWFWFWFW"]
    assert len({tuple(order) for order in orders.values()}) == len(orders)


def test_micro_batches_of_a_step_have_the_length_of_the_longest_or_of_a_full_one(alone, on_two):
    assert len(alone["lengths"]) > 1
    for rank in on_two["pipe"]:
        assert rank["lengths"] == alone["lengths"][-1:]
    for rank in on_two["one length"]:
        assert rank["lengths"] == [256]


CONTEXT = {**FSDP, "ringattn_parallel_size": 2, "ulysses_parallel_size": 2}
ON_FOUR = {
    "shards": {**FSDP, "data_parallel_shard_size": 4},
    "hybrid": {**FSDP, "data_parallel_shard_size": 2, "data_parallel_replicate_size": 2},
    **{f"over {mode}": {**CONTEXT, "cp_fsdp_mode": mode} for mode in ("all", "none")},
    **{f"over {axis}": {**CONTEXT, "cp_fsdp_mode": f"{axis}_only"} for axis in ("ring", "ulysses")},
}


@one_day_in(3, of=1)
def test_weights_are_sharded_over_the_axes_that_are_named(folder, alone):
    found = on_ranks(4, each, look, jobs_of(folder, ON_FOUR))
    shards = {name: [rank[name]["shards"] for rank in found] for name in ON_FOUR}
    everywhere, alike = [[0, 1, 2, 3]] * 4, [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert shards["shards"] == shards["over all"] == everywhere
    assert shards["hybrid"] == shards["over ulysses"] == alike
    assert shards["over ring"] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert shards["over none"] == [[0], [1], [2], [3]]
    for rank in found:
        for name, seen in rank.items():
            assert seen["held"] == pytest.approx(alone["held"] / len(seen["shards"])), name
            assert seen["result"][0] == pytest.approx(alone["result"][0], abs=LOSS_ATOL), name
            assert seen["result"][1] == pytest.approx(alone["result"][1], rel=NORM_RTOL), name
