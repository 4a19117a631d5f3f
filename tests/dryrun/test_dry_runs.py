"""Dry runs of small models in many layouts: no faults, and the counts of the golden file."""

import json

import pytest

from penstock.estimate.dryrun.summary import DryRun
from penstock.estimate.dryrun.trace import Launch, records_from_json
from tests.dryrun.cases import CASES, GOLDEN, counts
from tests.dryrun.layouts import DENSE, MOE, ROW, Case, dry_runs, estimated_memory
from tests.turns import one_day_in, taking_turns

pytestmark = pytest.mark.slow

NEEDED = {"one device", "fsdp", "moe", "moe, triton"}
"""Layouts that tests look at by name."""

ROUGH = {
    # What the gradients of a layer's adapters and of their inputs need at once.
    "ep, lora": (0.85, 1.1),
    # What is on its way to and from the host.
    "fsdp, activation offload": (0.8, 1.1),
    # How many micro-batches wait for their weight gradients is taken for the number of ranks.
    "interleaved zero bubble": (0.8, 1.1),
    "zbv": (0.8, 1.1),
    # Of gathered experts, two layers are assumed to be there at once.
    "moe, tp": (0.9, 1.25),
    "latent attention, tp": (0.9, 1.4),
}
"""Bounds of the estimate over the peak where it is rougher, and why."""

SMALL = {
    name: case
    for name, case in CASES.items()
    if name in ("fsdp", "tp, sequence parallel", "ring x ulysses", "1f1b x tp", "ep x 1f1b", "zbv")
}


PATHS = [
    *("one device, lora", "ddp", "fsdp, muon", "fsdp, offload", "fsdp, fp8", "fsdp, dpo"),
    *("tp, sequence parallel", "ring x ulysses", "1f1b x tp", "zbv", "ep x 1f1b", "ep, lora"),
]
"""One layout of each further path of the engine."""

EACH = [
    *sorted(NEEDED),
    *taking_turns(PATHS, 1),
    *taking_turns([name for name in CASES if name not in {*NEEDED, *PATHS}], 1),
]


MOST_LAUNCHES = {"Qwen3": 41, "Qwen3-MoE": 104}
"""Of a layer, without casts of weights and gradients, which FSDP has none of."""

IN_BF16 = {
    "data_parallel_mode": "none",
    "enable_gradient_checkpointing": False,
    "enable_mixed_precision": False,
    "precision": "bf16",
    "grad_accum_dtype": "bf16",
}
LAYERS = {
    f"{name} {count}": Case(world=1, model={**shape, "num_hidden_layers": count}, train=IN_BF16)
    for name, shape in {"Qwen3": DENSE, "Qwen3-MoE": MOE}.items()
    for count in (1, 2)
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, DryRun]:
    """The layouts that are asked for, in one start of the processes."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {spec.params.get("name") for spec in specs if spec}
    return dry_runs({**LAYERS, **{name: CASES[name] for name in CASES if name in asked | NEEDED}})


@pytest.mark.parametrize("name", EACH)
def test_a_layout_has_no_fault(found: dict[str, DryRun], name: str) -> None:
    assert dict(found[name].faults) == {}


@pytest.mark.parametrize("name", EACH)
def test_launches_copies_syncs_and_collectives_are_those_of_the_golden_file(
    found: dict[str, DryRun], name: str
) -> None:
    """`python -m tests.dryrun.cases` writes it again, so that a change shows as a diff."""
    assert counts(found[name]) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", EACH)
def test_the_estimate_of_plan_is_near_the_peak(found: dict[str, DryRun], name: str) -> None:
    least, most = ROUGH.get(name, (0.9, 1.1))
    assert least < estimated_memory(CASES[name]) / found[name].peak < most


def test_what_holds_the_peak_is_told_apart(found: dict[str, DryRun]) -> None:
    for name, kinds in {
        "fsdp": ("weights", "gradients", "optimizer", "activations", "logits", "gathered"),
        "one device": ("weights", "gradients", "optimizer", "activations"),
    }.items():
        [rank] = found[name].ranks
        holders = rank.result.holders
        assert sum(holders.values()) == rank.result.peak
        assert {kind for kind in kinds if not holders[kind]} == set(), (name, holders)
        assert holders["temporary"] < 0.2 * rank.result.peak


@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_a_layer_launches_few_kernels_forward_and_backward(
    found: dict[str, DryRun], name: str
) -> None:
    one, two = (
        sum(
            isinstance(record, Launch) and record.phase in ("forward", "backward")
            for record in records_from_json(found[f"{name} {count}"].ranks[0].result.records)
        )
        for count in (1, 2)
    )
    assert two - one <= MOST_LAUNCHES[name]


@one_day_in(3, of=1)
def test_a_dry_run_finds_the_same_again(found: dict[str, DryRun]) -> None:
    [first], [again] = found["moe"].ranks, dry_runs({"moe": CASES["moe"]})["moe"].ranks
    assert again.result == first.result


def test_experts_count_the_same_flops_with_pytorchs_products_and_with_triton(
    found: dict[str, DryRun],
) -> None:
    native, triton = (found[name].ranks[0].result.flops for name in ("moe", "moe, triton"))
    assert native == triton
    # Three matrices of the rows of a layer: forward, recomputed, and two products backward.
    rows = ROW * MOE["num_experts_per_tok"]
    each = 2 * rows * MOE["hidden_size"] * MOE["moe_intermediate_size"]
    experts = MOE["num_hidden_layers"] * 3 * each * 4
    dense = found["fsdp"].ranks[0].result.flops
    network = 2 * ROW * DENSE["hidden_size"] * DENSE["intermediate_size"]
    # Recomputation ends before the last product of a dense layer, whose output nothing saves.
    others = dense - DENSE["num_hidden_layers"] * network * (3 * 4 - 1)
    assert native == pytest.approx(experts + others, rel=0.001)


@pytest.mark.exhaustive
def test_all_ranks_of_a_layout_issue_matching_collectives() -> None:
    for name, one in dry_runs(SMALL, "all").items():
        assert len(one.ranks) == one.dims.world_size
        assert dict(one.faults) == {}, name


@pytest.mark.exhaustive
def test_ranks_of_one_stage_do_the_same() -> None:
    """So that one of them stands for all."""
    [one] = dry_runs({"1f1b x tp": CASES["1f1b x tp"]}, "all").values()
    each = one.dims.world_size // one.dims.pipeline
    for stage in range(one.dims.pipeline):
        alike = one.ranks[stage * each : (stage + 1) * each]
        assert len({rank.result.peak for rank in alike}) == 1
        # One of the ranks of a tensor-parallel group reports the loss, the others zero.
        assert max(rank.launches for rank in alike) <= min(rank.launches for rank in alike) + 1
