"""Pipeline stage assignment: the layers of each stage, and the stages of each rank.

A stage is a range of layers; the first also holds the embedding, the last the final norm, the LM
head and the layers that predict further tokens. No torch here: layouts are checked before heavy
imports.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from penstock.config.schema.parallelism import INTERLEAVED, V_SHAPED, PipelineSchedule
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError


def virtual_stages(train: TrainConfig) -> int:
    """Virtual stages per rank: the setting, or the schedule's minimum. Raises ConfigError for a
    number that the schedule cannot run."""
    schedule, written = train.pipeline_parallel_schedule, train.pipeline_parallel_virtual_stages
    if schedule not in INTERLEAVED + V_SHAPED:
        if written not in (None, 1):
            raise ConfigError(
                f"train.pipeline_parallel_virtual_stages is {written}, and train."
                f"pipeline_parallel_schedule {schedule} runs one stage on each rank.\n"
                "  Write 1, or pipeline_parallel_schedule: Interleaved1F1B."
            )
        return 1
    if written is None:
        return train.resolved_virtual_stages
    if schedule in V_SHAPED and written != 2:
        raise ConfigError(
            f"train.pipeline_parallel_virtual_stages is {written}, and train."
            f"pipeline_parallel_schedule {schedule} goes down the ranks and up again: two stages"
            " on each.\n  Write 2, or leave it out."
        )
    if written < 2:
        raise ConfigError(
            f"train.pipeline_parallel_virtual_stages is {written}, and train."
            f"pipeline_parallel_schedule {schedule} has nothing to interleave with one stage on"
            " each rank.\n  Write 2 or more, leave it out, or write"
            " pipeline_parallel_schedule: 1F1B."
        )
    return written


def stages_of_rank(train: TrainConfig, index: int) -> list[int]:
    """The stages of the rank at `index` in its pipeline, in order.

    Looped schedules take every `num_ranks`-th stage; V-shaped ones one stage on the way down and
    one on the way up.
    """
    num_ranks = train.pipeline_parallel_size
    if train.pipeline_parallel_schedule in V_SHAPED:
        return [index, 2 * num_ranks - 1 - index]
    return [index + num_ranks * round_index for round_index in range(virtual_stages(train))]


def layers_of_stages(train: TrainConfig, costs: Sequence[int], further: int = 0) -> list[range]:
    """The layers of every stage, given the cost of each layer; equal costs for a split by count.

    `further` layers after these predict further tokens, with the head once more each: the last
    stage has them all. Raises ConfigError for a list that does not split these layers, and for an
    empty stage between the first and the last.
    """
    num_layers, num_stages = len(costs), train.pipeline_parallel_size * virtual_stages(train)
    split = train.pipeline_parallel_split
    weights = ("pipeline_parallel_input_weight", "pipeline_parallel_output_weight")
    weights_set = [name for name in weights if train.is_non_default(name)]
    if split == "uniform":
        after = train.pipeline_parallel_output_weight * (1 + further) + further
        ends = train.pipeline_parallel_input_weight, after
        if len(set(costs)) > 1 and num_layers >= num_stages - 2:
            counts = _split_by_cost(tuple(costs), num_stages, *ends)
        else:
            counts = _split_evenly(num_layers, num_stages, *ends)
        firsts = [sum(counts[:stage]) for stage in range(num_stages)]
        idle = "there are"
    elif weights_set:
        raise ConfigError(
            f"train.pipeline_parallel_split {split} says which layers each stage holds, and train."
            f"{weights_set[0]} would change nothing.\n"
            "  Write pipeline_parallel_split: uniform, or leave the weights out."
        )
    else:
        firsts = split
        if len(firsts) != num_stages or firsts[-1] > num_layers:
            even = _split_evenly(num_layers, num_stages, 1, 1)
            example = [sum(even[:stage]) for stage in range(num_stages)]
            raise ConfigError(
                f"train.pipeline_parallel_split {firsts} does not name the first layer of each of"
                f" {num_stages} stages in a model of {num_layers} layers.\n"
                f"  Write {num_stages} numbers of at most {num_layers}, for example {example}, or"
                " uniform."
            )
        idle = f"train.pipeline_parallel_split {split} of"
    layers = [range(*bounds) for bounds in pairwise([*firsts, num_layers])]
    empty = [stage for stage, layer_range in enumerate(layers[:-1]) if stage and not layer_range]
    if empty:
        raise ConfigError(
            f"stage {empty[0]} of {num_stages} would hold no layer: {idle} {num_layers}"
            f" layers for train.pipeline_parallel_size {train.pipeline_parallel_size} x"
            f" {virtual_stages(train)} stages on each rank.\n"
            "  Write fewer ranks or stages, or a pipeline_parallel_split that gives each a layer."
        )
    return [*layers[:-1], range(layers[-1].start, num_layers + further)]


def _split_evenly(layers: int, stages: int, before: int, after: int) -> list[int]:
    """Layers of each stage; the embedding counts as `before` layers, norm and head as `after`.

    The remainder goes to the earliest stages. If an end costs more than a stage's share it gets a
    stage of its own, and the others share the layers.
    """
    if stages == 1:
        return [layers]
    base, remainder = divmod(layers + before + after, stages)
    shares = [base + (stage < remainder) for stage in range(stages)]
    if shares[0] < before:
        return [0, *_split_evenly(layers, stages - 1, 0, after)]
    if shares[-1] < after:
        return [*_split_evenly(layers, stages - 1, before, 0), 0]
    return [shares[0] - before, *shares[1:-1], shares[-1] - after]


@cache
def _split_by_cost(costs: tuple[int, ...], stages: int, before: int, after: int) -> list[int]:
    """Layers of each stage, so that the most costly stage costs as little as possible, and the
    others' costs differ little; the embedding costs as much as `before` layers do on average.

    Dynamic programming over the layers of the first stages.
    """
    # Times the number of layers: all costs stay whole numbers.
    count = len(costs)
    total = [*accumulate((count * cost for cost in costs), initial=before * sum(costs))]
    # By the end of the layers so far: the most costly stage, the sum of squared costs, all ends.
    best = {end: (cost, cost**2, [end]) for end, cost in enumerate(total)}
    for stage in range(1, stages):
        is_last = stage == stages - 1
        extra, least = (after * sum(costs), 0) if is_last else (0, 1)
        best = {
            end: min(
                (max(worst, cost), squares + cost**2, [*firsts, end])
                for start, (worst, squares, firsts) in best.items()
                if end - start >= least
                for cost in [total[end] - total[start] + extra]
            )
            # Stages between the first and the last have a layer each.
            for end in ([count] if is_last else range(min(best) + 1, count + 1))
        }
    _, _, bounds = best[count]
    return [end - start for start, end in pairwise([0, *bounds])]


def schedule_accepts(schedule: PipelineSchedule, num_ranks: int, micro_batches: int) -> bool:
    """Whether the schedule can run a step of so many micro-batches.

    1F1B fills the pipeline before its first backward pass; DualPipeV fills it from both ends.
    Interleaved schedules run in rounds of equal size, about one micro-batch per rank.
    """
    if schedule == "1F1B":
        return micro_batches >= num_ranks
    if schedule == "DualPipeV":
        return micro_batches >= 2 * num_ranks
    if schedule in INTERLEAVED:
        # As torch's ScheduleInterleaved1F1B: so many rounds, which must be equally long.
        return micro_batches % max(1, micro_batches // num_ranks) == 0
    return True


def describe_pipeline(train: TrainConfig, costs: Sequence[int], further: int = 0) -> str:
    """A one-line description of the pipeline, including inferred values."""
    virtual, layers = virtual_stages(train), list[str]()
    for stage in layers_of_stages(train, costs, further):
        first_and_last = f"{stage[0]}-{stage[-1]}" if len(stage) > 1 else str(stage.start)
        layers.append(first_and_last if stage else "none")
    is_chosen = virtual > (train.pipeline_parallel_virtual_stages or 1)
    chosen = " (the schedule's minimum)" if is_chosen else ""
    return (
        f"pipeline: {train.pipeline_parallel_schedule} on {train.pipeline_parallel_size} ranks x "
        f"{virtual} stages{chosen}, layers {' | '.join(layers)}"
    )


def require_trained_stages(
    train: TrainConfig, costs: Sequence[int], trained: Sequence[str]
) -> None:
    """Raise ConfigError if a rank would hold none of the `trained` modules, by their names in the
    model, with which the layers have these costs."""
    stages = layers_of_stages(train, costs)
    of_layer = {name.split(".")[2] for name in trained if name.startswith("model.layers.")}
    ends = {"model.embed_tokens": 0, "lm_head": len(stages) - 1}
    for index in range(train.pipeline_parallel_size):
        own_stages = stages_of_rank(train, index)
        layers = [number for stage in own_stages for number in stages[stage]]
        of_ends = any(name in trained and stage in own_stages for name, stage in ends.items())
        if of_ends or any(str(number) in of_layer for number in layers):
            continue
        raise ConfigError(
            f"lora.lora_target_modules names no layer of rank {index} of train."
            f"pipeline_parallel_size {train.pipeline_parallel_size}, which holds "
            f"{'layers ' + ', '.join(map(str, layers)) if layers else 'no layers'}: nothing would "
            "be trained there.\n"
            "  Write a pipeline_parallel_split, or targets, that give every rank an adapter."
        )
