"""Compact save plans: what is written is what DCP's own planner would have written."""

import pickle
from collections import Counter
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp

from penstock.core.files import regular_files
from penstock.engine.checkpoint.global_plan import plan_globally
from penstock.engine.checkpoint.local_plan import BoxShape, HeldTensor, LocalPlan
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from tests.engine.checkpoint.simulated_saves import (
    Mesh,
    Tensor,
    boxes_of,
    our_rank,
    save,
    torch_rank,
)

LAYERS = 3


def tensors_of(stages):
    """A model with its optimizer's states: layers over the stages, its head tied to the first."""
    shapes = {}
    for layer in range(LAYERS):
        stage = (layer * stages // LAYERS,)
        shapes |= {
            f"{layer}.up": Tensor((24, 10), 0, stage),
            f"{layer}.qkv": Tensor((36, 10), 0, stage, pieces=3),
            f"{layer}.down": Tensor((10, 24), 1, stage),
            f"{layer}.experts": Tensor((5, 4, 6), None, stage),
            f"{layer}.norm": Tensor((10,), None, stage),
        }
    shapes["embed"] = Tensor((26, 10), None, (0, stages - 1))
    saved = {f"model.{name}": tensor for name, tensor in shapes.items()}
    for name, tensor in shapes.items():
        for state in ("exp_avg", "exp_avg_sq"):
            saved[f"optimizer.{name}.{state}"] = tensor
        saved[f"optimizer.{name}.step"] = Tensor((), None, tensor.stages)
    return saved


def full_tensors(tensors):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(
            torch.bfloat16 if name.startswith("model.") else torch.float32
        )
        for name, tensor in tensors.items()
    }


def saved_by(make_rank, folder, mesh, tensors, full):
    def data(name, offsets, sizes):
        cut = (slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        return full[name][tuple(cut)]

    save(
        [make_rank(boxes_of(rank, mesh, tensors, data), folder) for rank in range(mesh.size)],
    )
    return pickle.loads((folder / ".metadata").read_bytes())


def entries(metadata):
    """Also the numbers of chunks, which `==` passes over."""
    return {
        (index.fqn, index.offset): (index.index, info)
        for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize(
    ("mesh", "has_copies"),
    [
        (Mesh(), False),
        (Mesh(shards=7), False),
        (Mesh(shards=3, tensor=2), True),
        (Mesh(replicas=3, shards=2), True),
        (Mesh(stages=2, shards=4), True),
        (Mesh(stages=3, replicas=2, shards=2, tensor=2), True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_boxes_are_written_as_by_torch_and_each_copy_once(tmp_path, mesh, has_copies):
    tensors = tensors_of(mesh.stages)
    if not has_copies:
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.shape}
    full = full_tensors(tensors)
    want = saved_by(torch_rank, tmp_path / "torch", mesh, tensors, full)
    got = saved_by(our_rank, tmp_path / "ours", mesh, tensors, full)
    assert CheckpointFiles(tmp_path / "ours").read_metadata().storage_data == got.storage_data
    read = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    dcp.load(read, checkpoint_id=tmp_path / "ours", no_dist=True)
    for name, tensor in full.items():
        assert torch.equal(read[name], tensor), name
    if not has_copies:
        assert got == want
        assert list(got.state_dict_metadata) == list(want.state_dict_metadata)
        assert entries(got) == entries(want)
        for path in regular_files(tmp_path / "torch"):
            ours = tmp_path / "ours" / path.name
            assert path.name == ".metadata" or path.read_bytes() == ours.read_bytes()
        return
    assert got.storage_data.keys() == want.storage_data.keys()
    for name, entry in want.state_dict_metadata.items():
        ours = got.state_dict_metadata[name]
        assert (ours.size, ours.properties) == (entry.size, entry.properties)
        assert sorted(ours.chunks, key=str) == sorted(entry.chunks, key=str)
    assert max(loads(got).values()) <= max(loads(want).values())


def loads(metadata):
    """The bytes of tensors in each file."""
    totals = Counter()
    for index, info in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        chunk = entry.chunks[index.index]
        assert chunk.offsets == index.offset
        totals[info.relative_path] += prod(chunk.sizes) * entry.properties.dtype.itemsize
    return totals


def plan_of(*boxes, shape=(4, 6), dtype=torch.float32):
    shapes = [BoxShape((top, left), (rows, columns)) for top, left, rows, columns in boxes]
    return LocalPlan.of({HeldTensor("weight", dtype, shape, len(boxes)): shapes})


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([plan_of((0, 0, 2, 6)), plan_of((1, 0, 3, 6))], "weight has boxes that overlap"),
        ([plan_of((0, 0, 4, 3), (0, 3, 2, 3)), plan_of((1, 4, 3, 2))], "overlap"),
        ([plan_of((0, 0, 2, 6)), plan_of((2, 0, 3, 6))], r"outside of its shape \(4, 6\)"),
        ([plan_of((0, 0, 2, 6)), plan_of((2, 0, 1, 6))], "ranks hold 18 of 24 numbers of weight"),
        (
            [plan_of((0, 0, 2, 6)), plan_of((2, 0, 2, 6), dtype=torch.bfloat16)],
            "weight in several dtypes or shapes",
        ),
        (
            [plan_of((0, 0, 2, 6)), plan_of((2, 0, 3, 6), shape=(5, 6))],
            "weight in several dtypes or shapes",
        ),
    ],
)
def test_boxes_that_are_no_whole_tensor_are_refused(plans, message):
    with pytest.raises(ValueError, match=message):
        plan_globally(plans)


def test_one_rank_may_hold_a_part_and_others_nothing():
    assert plan_globally([plan_of((0, 0, 2, 6))]).ranks[0].is_written.all()
    plan = plan_globally([LocalPlan.of({}), plan_of((0, 0, 4, 6))])
    assert [rank.is_written.tolist() for rank in plan.ranks] == [[], [True]]
    assert plan_globally([LocalPlan.of({})]).tensors == {}
