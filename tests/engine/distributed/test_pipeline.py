"""A pipeline of any schedule computes what one model does."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from penstock.adapters.inject import LoraSpec, inject
from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.train import TrainConfig
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.activations.checkpointing import (
    apply_activation_checkpointing,
    checkpoint_kind,
)
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.parallel_model import ModelInputs, build_stage_modules
from penstock.engine.distributed.pipeline_parallel import Pipeline
from penstock.engine.distributed.pipeline_stages import (
    stages_of_rank,
)
from penstock.losses.cross_entropy import sum_cross_entropy
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.initialize import initialize
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.rows.collate import collate
from penstock.rows.reader import Row
from penstock.train.dataloader import LoaderConfig
from penstock_kernels.attention import VarlenMetadata
from tests.engine import runs
from tests.ranks import on_ranks

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)

# Sums in another order, from fp32: twenty times what was seen.
GRADIENT_RTOL = 1e-5
LOSS_ATOL = 2e-6
# One rounding of bf16, in the loss and in each gradient.
BF16_RTOL = 2**-7


def train_of(**settings):
    return TrainConfig(
        **{
            "output_dir": "out",
            "enable_mixed_precision": False,
            "pipeline_parallel_size": 2,
            **settings,
        }
    )


def config_of(layers, *, tied):
    return DecoderConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        qk_norm=True,
        initializer_range=0.2,
    )


def filled(config, part=None, lora=None):
    """A model, or a part of one, with the weights that their names give."""
    model = Decoder(config, part=part)
    if lora:
        inject(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = EMBEDDING_WEIGHT if config.tie_word_embeddings and "head" in name else name
            parameter.copy_(initialize(name, parameter.shape, 3, config))
    return model


def batches_of(seed, count, longest):
    """Micro-batches of one length, of uneven documents, the last one of padding alone."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(count - 1):
        lengths = rng.integers(1, longest, size=rng.integers(1, 5)).astype(np.int32)
        ids = rng.integers(0, 67, size=lengths.sum()).astype(np.int32)
        labels = np.where(rng.random(len(ids)) < 0.7, np.roll(ids, -1), -100).astype(np.int32)
        groups.append([Row(ids, labels, lengths, len(groups))])
    laid = collate([*groups, []], pad_to_multiple_of=4, pad_to="longest")
    return laid.micro_batches()


def calls_of(batches, trained):
    def reduce(hidden_TD, head, labels_T):
        return sum_cross_entropy(hidden_TD, head, labels_T) / trained

    return [
        ModelInputs(
            batch.input_ids_T,
            batch.position_ids_T,
            VarlenMetadata.of(batch.lengths),
            partial(reduce, labels_T=batch.labels_T),
        )
        for batch in batches
    ]


def whole_run(model, calls, casting=nullcontext):
    """Loss and gradients of one model, micro-batch by micro-batch."""
    total = 0.0
    for call in calls:
        with casting():
            loss = model(call.input_ids_T, call.position_ids_T, call.segments, call.output_fn)
        loss.backward()
        total += loss.item()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if model.is_tied:
        gradients[HEAD_WEIGHT] = gradients[EMBEDDING_WEIGHT]
    return total, gradients


def compare(
    schedule,
    degrees,
    *,
    layers=4,
    tied=True,
    recomputed="none",
    sharded="no",
    lora=None,
    settings=None,
    casting=nullcontext,
    rtol=GRADIENT_RTOL,
):
    """Two steps, of different lengths, against one model on all rows; says what was computed."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(degrees, rank, "cpu")
    config = config_of(layers, tied=tied)
    train = train_of(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_size=degrees.pipeline,
        **(settings or {}),
    )
    parts = [
        filled(config, part, lora)
        for part in build_stage_modules(config, train, mesh.index("pipeline"), 64)
    ]
    seen, computed, order = [], [], []
    for number, part in zip(
        stages_of_rank(train, mesh.index("pipeline")),
        parts,
        strict=True,
    ):
        part.register_forward_hook(partial(note, number, order))
        for layer in part.model.layers.values():
            layer.register_forward_pre_hook(lambda *_: computed.append(1))
        if recomputed != "none":
            modules = None if recomputed == "layers" else ["self_attn", "mlp"]
            apply_activation_checkpointing(part, modules, checkpoint_kind(train))
        if sharded != "no":
            shard(part, mesh, reshard=sharded == "resharded")
        part.register_forward_pre_hook(
            lambda _, given: seen.append(bool(given[0].isfinite().all()))
        )
    pulse, told = Heartbeat(), []
    pulse.set_listener(lambda beat: told.append(beat.phase[0].upper()))
    device = torch.device("cpu")
    pipeline = Pipeline(parts, mesh, train, device=device, autocast=casting, heartbeat=pulse)
    count = 2 * degrees.pipeline
    for step, longest in enumerate((9, 14)):
        batches = [batches_of((step, row), count, longest) for row in range(degrees.num_replicas)]
        trained = sum(batch.num_trained for its in batches for batch in its)
        wanted, gradients = whole_run(
            filled(config, lora=lora),
            [call for its in batches for call in calls_of(its, trained)],
            casting,
        )
        calls = calls_of(batches[mesh.index("replicate", "shard")], trained)
        evaluated = pipeline.forward(calls)
        seen.clear()
        computed.clear()
        order.clear()
        told.clear()
        loss = pipeline.forward_backward(calls)
        assert seen == [True] * count * len(parts), "a stage runs once per micro-batch"
        if lora is None:
            assert_told(told, order, schedule)
        times = 2 if recomputed == "layers" else 1
        assert len(computed) == times * count * sum(len(part.model.layers) for part in parts)
        assert not loss.requires_grad
        pipeline.all_reduce_copied_grads()
        both = torch.stack([loss, evaluated])
        torch.distributed.all_reduce(both)
        assert both.tolist() == pytest.approx([wanted] * 2, abs=LOSS_ATOL, rel=rtol), schedule
        for part in parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None
                    difference = (runs.whole(parameter.grad) - gradients[name]).norm()
                    assert difference <= rtol * gradients[name].norm(), (schedule, name)
                    parameter.grad = None
                else:
                    assert parameter.grad is None
    trained = [name for part in parts for name, p in part.named_parameters() if p.requires_grad]
    return trained, " ".join(order)


def note(number, order, _, _given, output):
    """Write down the forward passes of a stage and, when they come, the backward ones."""
    order.append(f"F{number}")
    if output.requires_grad:
        output.register_hook(lambda _: order.append(f"B{number}"))


def assert_told(told, order, schedule):
    """Passes are told as they begin, by their first letters, and that it waits between them."""
    passes = [phase for phase in told if phase != "W"]
    computed = [each[0] for each in order]
    if schedule in SPLIT_BACKWARD:
        # The backward pass to weights is one of its own.
        assert passes.count("F") == computed.count("F")
        assert passes.count("B") > computed.count("B")
    else:
        assert passes == computed
    assert told[0] == told[-1] == "W"


def shard(part, mesh, *, reshard):
    settings = {
        "mesh": mesh.fsdp_mesh("all")["shard"],
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(),
    }
    for layer in part.model.layers.values():
        fully_shard(layer, **settings)
    fully_shard(part, **settings)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def each(cases, degrees):
    return [compare(degrees=degrees, **case) for case in cases]


TWO = ParallelDims(pipeline=2)


@pytest.mark.dist
def test_every_schedule_on_two_ranks_computes_what_one_model_does():
    """Recomputing nothing, layers or their parts."""
    cases = [
        {"schedule": schedule, "recomputed": recomputed, "tied": True}
        for schedule, recomputed in zip(SCHEDULES, ("none", "layers", "parts") * 2, strict=True)
    ]
    cases += [{"schedule": schedule, "tied": False} for schedule in ("1F1B", "ZBVZeroBubble")]
    of_first, of_second = on_ranks(2, each, cases, TWO)
    for case, first, second in zip(cases, of_first, of_second, strict=True):
        everything = [n for n, _ in Decoder(config_of(4, tied=case["tied"])).named_parameters()]
        copy = [HEAD_WEIGHT] * case["tied"]
        assert sorted(first[0] + second[0]) == sorted(everything + copy)
    orders = {
        case["schedule"]: (first[1], second[1])
        for case, first, second in zip(cases, of_first, of_second, strict=True)
    }
    assert len(set(orders.values())) == len(SCHEDULES)
    # As their papers draw them.
    assert orders["GPipe"][0] == "F0 F0 F0 F0 B0 B0 B0 B0"
    assert orders["1F1B"] == ("F0 F0 B0 F0 B0 F0 B0 B0", "F1 B1 F1 B1 F1 B1 F1 B1")


@pytest.mark.dist
def test_adapters_and_stages_that_train_nothing_pass_gradients_on():
    lora = LoraSpec(rank=2, alpha=4, targets=("q_proj", "down_proj"))
    cases = [
        {"schedule": schedule, "layers": 2, "tied": False, "lora": lora}
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    ]
    casting = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    mixed = {
        "schedule": "1F1B",
        "settings": {"enable_mixed_precision": True},
        "casting": casting,
        "rtol": BF16_RTOL,
    }
    on_ranks(2, each, [*cases, mixed], TWO)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.exhaustive
def test_sharded_stages_compute_what_one_model_does():
    """On a mesh of one rank and of two; freed after the forward pass where a schedule allows it."""
    cases = [
        {"schedule": schedule, "sharded": sharded, "recomputed": recomputed}
        for sharded, recomputed in (("kept", "layers"), ("resharded", "none"))
        for schedule in SCHEDULES
        if sharded == "kept" or schedule not in SPLIT_BACKWARD
    ]
    on_ranks(2, each, cases, TWO)
    on_ranks(4, each, cases, ParallelDims(pipeline=2, shard=2))


@pytest.mark.dist
@pytest.mark.exhaustive
def test_every_schedule_on_four_ranks_computes_what_one_model_does():
    cases = [
        {"schedule": schedule, "layers": 6, "tied": tied, "recomputed": recomputed}
        for schedule, (tied, recomputed) in zip(
            SCHEDULES, [(True, "layers"), (False, "none")] * 3, strict=True
        )
    ]
    split = {
        "schedule": "Interleaved1F1B",
        "layers": 7,
        "settings": {
            "pipeline_parallel_virtual_stages": 3,
            "pipeline_parallel_split": [0, 0, 2, 3, 5, 7],
        },
    }
    on_ranks(4, each, cases, ParallelDims(pipeline=4))
    on_ranks(2, each, [split], TWO)


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({"pipeline_parallel_size": 1}, [8, 24, 8]),
        ({}, [24, 24, 24]),
        ({"pp_variable_seq_lengths": False}, [64, 64, 64]),
        ({"pp_variable_seq_lengths": False, "micro_batch_size": 2}, [128, 128, 128]),
    ],
)
def test_micro_batches_of_a_pipeline_are_as_long_as_the_longest_or_all_alike(settings, lengths):
    train = {"pipeline_parallel_size": 2, "data_parallel_mode": "none", **settings}
    data = {"sample_packing_sequence_len": 64, "pad_to_multiple_of": 8}
    run = runs.run_config(Path("unused"), Path("out"), data=data, **train)
    reading = LoaderConfig.of(run, torch.device("cpu"))

    def row(length):
        ids = np.arange(length, dtype=np.int32)
        return Row(ids, ids, np.array([length], np.int32), 0)

    laid = collate(
        [[row(5)], [row(20)], []],
        pad_to_multiple_of=reading.pad_to_multiple_of,
        pad_to=reading.pad_to,
    )
    assert [sum(batch.lengths) for batch in laid.micro_batches()] == lengths
