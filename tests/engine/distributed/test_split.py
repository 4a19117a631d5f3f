"""Which layers and micro-batches the stages of a pipeline get."""

from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from penstock.core.errors import ConfigError
from penstock.engine.distributed.parallel_model import build_stage_modules
from penstock.engine.distributed.pipeline_stages import (
    describe_pipeline,
    layers_of_stages,
    schedule_accepts,
    stages_of_rank,
    virtual_stages,
)
from tests.engine.distributed.test_pipeline import SCHEDULES, config_of, train_of
from tests.ranks import on_ranks


def shown(stages, layers, **settings):
    """A split as letters: the embedding E, layers, the norm N, the head H."""
    train = train_of(pipeline_parallel_size=stages, **settings)
    config = config_of(layers, tied=True)
    parts = [
        part for index in range(stages) for part in build_stage_modules(config, train, index, 64)
    ]
    return " | ".join(
        " ".join(["E"] * p.has_embedding + [f"L{n}" for n in p.layers] + ["N H"] * p.has_head)
        for p in parts
    )


@pytest.mark.parametrize(
    ("stages", "layers", "settings", "wanted"),
    [
        (2, 4, {}, "E L0 L1 | L2 L3 N H"),
        (2, 5, {}, "E L0 L1 L2 | L3 L4 N H"),
        (4, 8, {}, "E L0 L1 | L2 L3 L4 | L5 L6 | L7 N H"),
        (4, 7, {}, "E L0 L1 | L2 L3 | L4 L5 | L6 N H"),
        (
            4,
            8,
            {"pipeline_parallel_output_weight": 3},
            "E L0 L1 | L2 L3 L4 | L5 L6 L7 | N H",
        ),
        (
            4,
            8,
            {"pipeline_parallel_split": [0, 1, 4, 7]},
            "E L0 | L1 L2 L3 | L4 L5 L6 | L7 N H",
        ),
        (4, 2, {}, "E | L0 | L1 | N H"),
        (2, 1, {}, "E L0 | N H"),
        (1, 2, {}, "E L0 L1 N H"),
        # An end heavier than its share: the others share what is left.
        (
            4,
            8,
            {"pipeline_parallel_input_weight": 9, "pipeline_parallel_output_weight": 9},
            "E | L0 L1 L2 L3 | L4 L5 L6 L7 | N H",
        ),
    ],
)
def test_layers_are_split_as_the_reference_splits_them(stages, layers, settings, wanted):
    assert shown(stages, layers, **settings) == wanted


def test_layers_that_predict_further_tokens_are_in_the_last_stage_and_count():
    assert layers_of_stages(train_of(), [1] * 6) == [range(3), range(3, 6)]
    # One more layer, and the head once more.
    assert layers_of_stages(train_of(), [1] * 6, 1) == [range(4), range(4, 7)]
    by_hand = train_of(pipeline_parallel_split=[0, 1])
    assert layers_of_stages(by_hand, [1] * 6, 2) == [range(1), range(1, 8)]


@pytest.mark.parametrize(
    ("costs", "stages", "weights", "wanted"),
    [
        ([3, 1, 1, 1, 1, 1], 2, (0, 0), [0, 2]),
        ([1, 1, 1, 5] * 2, 4, (0, 0), [0, 3, 4, 7]),
        ([1, 1, 1, 3] * 4, 4, (1, 1), [0, 4, 8, 13]),
        # The embedding costs as much as all layers, and the head as one on average.
        ([2, 1, 1, 4], 3, (4, 1), [0, 0, 3]),
        ([1, 9], 4, (1, 1), [0, 0, 1, 2]),
    ],
)
def test_layers_of_unlike_cost_are_split_by_cost(costs, stages, weights, wanted):
    before, after = weights
    train = train_of(
        pipeline_parallel_size=stages,
        pipeline_parallel_input_weight=before,
        pipeline_parallel_output_weight=after,
    )
    found = layers_of_stages(train, costs)
    assert [layers.start for layers in found] == wanted
    ends = [before, *[0] * (stages - 2), after]
    mean = sum(costs) / len(costs)

    def slowest(bounds):
        parts = zip(ends, pairwise(bounds), strict=True)
        return max(extra * mean + sum(costs[slice(*part)]) for extra, part in parts)

    inner = combinations_with_replacement(range(len(costs) + 1), stages - 1)
    full = [each for each in inner if all(one < other for one, other in pairwise(each))]
    best = min(slowest([0, *each, len(costs)]) for each in full)
    assert slowest([layers.start for layers in found] + [len(costs)]) == best


def test_stages_lie_on_ranks_in_a_loop_or_a_v():
    def of_ranks(schedule):
        train = train_of(pipeline_parallel_schedule=schedule, pipeline_parallel_size=4)
        return [stages_of_rank(train, index) for index in range(4)]

    assert of_ranks("Interleaved1F1B") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert of_ranks("DualPipeV") == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_the_number_of_stages_that_a_schedule_needs_is_filled_in_and_said():
    train = train_of(pipeline_parallel_schedule="ZBVZeroBubble")
    assert describe_pipeline(train, [1] * 6) == (
        "pipeline: ZBVZeroBubble on 2 ranks x 2 stages (the schedule's minimum), "
        "layers 0 | 1-2 | 3-4 | 5"
    )
    assert "(" not in describe_pipeline(train_of(), [1] * 6)
    three = train_of(
        pipeline_parallel_schedule="Interleaved1F1B", pipeline_parallel_virtual_stages=3
    )
    assert virtual_stages(three) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_virtual_stages": 2}, "Write 1, or pipeline_parallel_schedule: Inter"),
        (
            {
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_virtual_stages": 1,
            },
            "Write 2 or more",
        ),
        (
            {"pipeline_parallel_schedule": "DualPipeV", "pipeline_parallel_virtual_stages": 3},
            "Write 2, or leave it out",
        ),
        ({"pipeline_parallel_split": [0, 2, 4]}, r"for example \[0, 3\]"),
        ({"pipeline_parallel_split": [0, 7]}, r"for example \[0, 3\]"),
        (
            {"pipeline_parallel_size": 3, "pipeline_parallel_split": [0, 3, 3]},
            "stage 1 of 3 would hold no layer",
        ),
        ({"pipeline_parallel_size": 9}, "would hold no layer: there are 6 layers"),
        (
            {"pipeline_parallel_split": [0, 3], "pipeline_parallel_output_weight": 2},
            "leave the weights out",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused_with_what_to_write(settings, message):
    with pytest.raises(ConfigError, match=message):
        layers_of_stages(train_of(**settings), [1] * 6)


def test_a_schedule_takes_the_micro_batches_that_torchs_takes():
    on_ranks(1, tried)


def tried():
    """Every schedule built for a few numbers of ranks, of which there is one."""
    torch.distributed.destroy_process_group()
    shape, device = torch.empty(1, device="meta"), torch.device("cpu")
    for ranks in (2, 3):
        torch.distributed.init_process_group("fake", rank=0, world_size=ranks)
        for schedule in SCHEDULES:
            train = train_of(pipeline_parallel_schedule=schedule, pipeline_parallel_size=ranks)
            numbers = stages_of_rank(train, 0)
            stages = [
                PipelineStage(
                    torch.nn.Identity(), number, ranks * len(numbers), device, shape, shape
                )
                for number in numbers
            ]
            for count in range(1, 9):
                settings = {"n_microbatches": count, "loss_fn": max}
                try:
                    get_schedule_class(schedule)(
                        stages[0] if len(stages) == 1 else stages, **settings
                    )
                    accepted = True
                except ValueError:
                    accepted = False
                assert schedule_accepts(schedule, ranks, count) == accepted, (
                    schedule,
                    ranks,
                    count,
                )
        torch.distributed.destroy_process_group()
