"""Which experts lie on which ranks, what travels between these, and what is kept of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file

from penstock.models.layers.experts import Experts
from penstock.train.launch.job import CHECKPOINTS
from tests.engine.inputs import write_rows
from tests.engine.layouts import LAYOUTS
from tests.engine.loops import (
    before_each_update,
    decoder_of,
    each,
    gradients_of,
    loop_of,
    save,
    step,
)
from tests.engine.traces import exported
from tests.ranks import on_ranks

NEAR, FAR = "ep 2 over shard 4", "ep 2 over shard 4, far apart"
ACTS = "only gates recomputed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_rows(folder / "packed", 8)
    return folder


def seen(job):
    """Ranks that share experts, experts here, exchanges of rows and of their numbers in one step,
    and its gradients."""
    loop = loop_of(job)
    ranks = loop.built.engine.model.mesh.expert_mesh()["expert"].mesh.tolist()
    experts = decoder_of(loop).get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, Experts)
    exchange, kinds = dist.all_to_all_single, []

    def counted(out, rows, *splits, **how):
        kinds.append("rows" if rows.is_floating_point() else "numbers")
        return exchange(out, rows, *splits, **how)

    gradients = before_each_update(loop, lambda: gradients_of(loop))
    dist.all_to_all_single = counted
    try:
        step(loop)
    finally:
        dist.all_to_all_single = exchange
    exchanges = kinds.count("rows"), kinds.count("numbers")
    return (
        ranks,
        experts.num_experts,
        exchanges,
        gradients[0] if loop.ranks.is_main_process else None,
    )


@pytest.mark.dist
def test_experts_are_shared_by_neighbours_or_by_ranks_far_apart(folder):
    jobs = {name: LAYOUTS[name].job(folder, name) for name in (NEAR, FAR)}
    jobs[ACTS] = LAYOUTS[NEAR].job(folder, ACTS, moe_checkpoint_method="moe_act")
    found = on_ranks(4, each, seen, jobs)
    assert [mine[NEAR][0] for mine in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [mine[FAR][0] for mine in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for mine in found:
        assert all(experts == 4 for _, experts, *_ in mine.values())
        # Three layers with experts: there and back, forward, computed again, and backward. What is
        # computed again has the numbers of rows from before.
        assert mine[NEAR][2] == mine[FAR][2] == (3 * 2 * 3, 3)
        # Computing gates again sends nothing: half as much is dispatched.
        assert mine[ACTS][2] == (3 * 2 * 2, 3)
    wanted, got = found[0][NEAR][3], found[0][ACTS][3]
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], gradient) for name, gradient in wanted.items())


def saved_again(first, second):
    """A checkpoint of the first job's start, and one of what the second takes from that."""
    save(loop_of(first))
    loop = loop_of(second)
    loop._resume()
    save(loop)


@pytest.mark.dist
@pytest.mark.slow
def test_experts_pass_through_checkpoints_of_other_layouts_to_the_bit(folder):
    four, two = LAYOUTS["ep 4 over shard 4"], LAYOUTS["ep 2 over shard 2 x tp 2"]
    first = four.job(folder, "by four")
    start = first.output_dir / CHECKPOINTS / "global_step_0"
    second = two.job(folder, "by two", load_checkpoint_path=str(start))
    # Without weights of its own: what it has, it has from the checkpoint.
    on_ranks(4, saved_again, first, replace(second, weights=None))
    [source] = (folder / four.kind).glob("*.safetensors")
    before, after = load_file(source), load(exported(second)["hf/model.safetensors"])
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {t.dtype for t in after.values()} == {t.dtype for t in before.values()}
