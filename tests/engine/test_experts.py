"""Which experts lie on which ranks, and what travels between these."""

import pytest
import torch.distributed as dist

from penstock.models.layers.experts import Experts
from tests.engine.layouts import LAYOUTS, write_inputs
from tests.engine.loops import decoder_of, each, loop_of, step
from tests.ranks import on_ranks

NEAR, FAR = "ep 2 over shard 4", "ep 2 over shard 4, far apart"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_inputs(folder, 8)
    return folder


def seen(job):
    """Ranks that share experts, experts here, and exchanges of rows in one step."""
    loop = loop_of(job)
    ranks = loop.built.engine.layout.mesh.experts()["expert"].mesh.tolist()
    experts = decoder_of(loop).get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, Experts)
    exchange, sizes = dist.all_to_all_single, []

    def counted(out, rows, *splits, **how):
        sizes.append(tuple(rows.shape))
        return exchange(out, rows, *splits, **how)

    dist.all_to_all_single = counted
    try:
        step(loop)
    finally:
        dist.all_to_all_single = exchange
    width = loop.built.engine.layout.parts[0].config.hidden_size
    return ranks, experts.num_experts, sum(shape[-1] == width for shape in sizes)


@pytest.mark.dist
def test_experts_are_shared_by_neighbours_or_by_ranks_far_apart(folder):
    jobs = {name: LAYOUTS[name].job(folder, name) for name in (NEAR, FAR)}
    found = on_ranks(4, each, seen, jobs)
    assert [mine[NEAR][0] for mine in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [mine[FAR][0] for mine in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for mine in found:
        for _, experts, exchanges in mine.values():
            assert experts == 4
            # Three layers with experts: there and back, forward, computed again, and backward.
            assert exchanges == 3 * 2 * 3
