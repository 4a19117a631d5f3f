"""Planning of a checkpoint on many ranks: `python -m tests.bench.artifacts.bench_save_plans
[--ranks N] [--peer-ranks N] [--rounds N] [--layouts sharded replicas tensor stages]`.

Weights in bf16 and AdamW's two moments in fp32 of a model of 70B on N ranks (1,024), in one process
and without tensors: each rank's plan is made and pickled as ranks send it; then what rank 0 does is
timed: unpickle, plan, pickle the answers, and after the ranks have written, of which only the
lengths are simulated, unpickle these and write the metadata. The peer is DCP's own planner on
`--peer-ranks` ranks (128: at 1,024 it needs minutes and 10 GB; 0: none), interleaved with ours on
as many. Medians; the goal is for ours on N ranks.
"""

import argparse
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.engine.distributed.object_unpickler import ObjectPickler, ObjectUnpickler
from penstock.models.decoder_config import DecoderConfig
from penstock.models.weights import WeightMap
from tests.engine.checkpoint.simulated_saves import (
    BoxData,
    Mesh,
    Tensor,
    boxes_of,
    our_rank,
    torch_rank,
)

LAYOUTS: dict[str, Callable[[int], Mesh]] = {
    "sharded": lambda ranks: Mesh(shards=ranks),
    "replicas": lambda ranks: Mesh(replicas=2, shards=ranks // 2),
    "tensor": lambda ranks: Mesh(shards=ranks // 8, tensor=8),
    "stages": lambda ranks: Mesh(stages=4, shards=ranks // 32, tensor=8),
}
GOAL_SECONDS, GOAL_BYTES = 2.0, 20e6
ROWWISE = ("o_proj", "down_proj")
ENTRY_BYTES = 1300
"""Of a tensor in a file beside its data, about."""


def tensors_70b(stages: int) -> dict[str, Tensor]:
    config = DecoderConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )
    saved: dict[str, Tensor] = {}
    for name, shape in WeightMap(config).hf_shapes().items():
        layer = name.partition("layers.")[2].partition(".")[0]
        last = 0 if "embed_tokens" in name else stages - 1
        stage = int(layer) * stages // config.num_hidden_layers if layer else last
        split = None if len(shape) == 1 else int(any(module in name for module in ROWWISE))
        tensor = Tensor(tuple(shape), split, (stage,))
        saved |= {f"model.{name}": tensor}
        saved |= {f"optimizer.{name}.{state}": tensor for state in ("exp_avg", "exp_avg_sq")}
    return saved


def sizes_only() -> BoxData:
    """Tensors without memory."""
    made: dict[Any, torch.Tensor] = {}

    def data(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        del offsets
        dtype = torch.bfloat16 if name.startswith("model.") else torch.float32
        if (sizes, dtype) not in made:
            made[sizes, dtype] = torch.empty(sizes, dtype=dtype, device="meta")
        return made[sizes, dtype]

    return data


def write_nothing(self: Any, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
    """In place of `FileSystemWriter.write_data`."""
    del self, planner
    results: list[WriteResult] = []
    offset = 0
    for item in plan.items:
        assert item.tensor_data
        size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        info = _StorageInfo(f"{plan.storage_data.prefix}0.distcp", offset, size + ENTRY_BYTES)
        results.append(WriteResult(item.index, info.length, info))
        offset += info.length
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


@dataclass
class Costs:
    """Of one save."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """CPU seconds of rank 0."""
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes."""

    @contextmanager
    def timed(self, step: str):
        started = time.process_time()
        yield
        self.seconds[step] = time.process_time() - started

    def sent(self, step: str, objects: Sequence[Any]) -> list[bytes]:
        """The objects as ranks send them."""
        pickles = [pickled(sent) for sent in objects]
        self.sizes[step] = sum(map(len, pickles))
        return pickles


def pickled(sent: Any) -> bytes:
    buffer = io.BytesIO()
    ObjectPickler(buffer).dump(sent)
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    return ObjectUnpickler(io.BytesIO(data)).load()


def save(
    make_rank: Callable[..., tuple[SavePlanner, StorageWriter]], mesh: Mesh, folder: Path
) -> Costs:
    costs = Costs()
    data, tensors = sizes_only(), tensors_70b(mesh.stages)

    def rank_of(rank: int) -> tuple[SavePlanner, StorageWriter]:
        planner, writer = make_rank(boxes_of(rank, mesh, tensors, data), folder)
        writer.set_up_storage_writer(rank == 0)
        return planner, writer

    planner, writer = rank_of(0)
    with costs.timed("its own plan"):
        local_plans = [pickled(writer.prepare_local_plan(planner.create_local_plan()))]
    for rank in range(1, mesh.size):
        # Made anew when it writes: boxes of all ranks would be in the way of rank 0's collector.
        rank_planner, rank_writer = rank_of(rank)
        local_plans += [pickled(rank_writer.prepare_local_plan(rank_planner.create_local_plan()))]
    costs.sizes["gathered plans"] = sum(map(len, local_plans))
    with costs.timed("unpickling plans"):
        plans = [unpickled(plan) for plan in local_plans]
    del local_plans
    with costs.timed("planning"):
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    with costs.timed("pickling answers"):
        answers = costs.sent("scattered plans", plans)
    del plans
    with costs.timed("its own items"):
        plan = planner.finish_plan(unpickled(answers[0]))
        results = [pickled(writer.write_data(plan, planner).wait())]
    for rank, answer in enumerate(answers[1:], start=1):
        rank_planner, rank_writer = rank_of(rank)
        plan = rank_planner.finish_plan(unpickled(answer))
        results.append(pickled(rank_writer.write_data(plan, rank_planner).wait()))
    del answers
    costs.sizes["gathered results"] = sum(map(len, results))
    with costs.timed("unpickling results"):
        gathered = [unpickled(result) for result in results]
    with costs.timed("writing metadata"):
        writer.finish(metadata, gathered)
    with costs.timed("pickling metadata for all"):
        costs.sent("metadata to each rank", [metadata])
    costs.sizes[".metadata"] = (folder / ".metadata").stat().st_size
    return costs


def median_costs(costs: Sequence[Costs]) -> Costs:
    return Costs(
        {step: statistics.median(one.seconds[step] for one in costs) for step in costs[0].seconds},
        costs[0].sizes,
    )


def show(title: str, costs: Costs) -> None:
    print(f"{title}: rank 0 {sum(costs.seconds.values()):.2f} CPU s")
    for step, seconds in costs.seconds.items():
        print(f"    {step:28} {seconds:8.3f} s")
    for step, size in costs.sizes.items():
        print(f"    {step:28} {size / 1e6:8.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--peer-ranks", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["sharded"])
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    FileSystemWriter.write_data = write_nothing
    peers = given.peer_ranks
    with tempfile.TemporaryDirectory() as folder:
        ours: list[Costs] = []
        theirs: list[Costs] = []
        for _ in range(given.rounds if peers else 0):
            ours.append(save(our_rank, Mesh(shards=peers), Path(folder)))
            theirs.append(save(torch_rank, Mesh(shards=peers), Path(folder)))
        if peers:
            our_costs, their_costs = median_costs(ours), median_costs(theirs)
            show(f"ours, {peers} ranks", our_costs)
            show(f"DCP's planner, {peers} ranks", their_costs)
            ratio = sum(their_costs.seconds.values()) / sum(our_costs.seconds.values())
            print(f"ratio {ratio:.1f} of CPU s")
        for name in given.layouts:
            mesh = LAYOUTS[name](given.ranks)
            costs = median_costs([save(our_rank, mesh, Path(folder)) for _ in range(given.rounds)])
            show(f"ours, {mesh.size} ranks, {name}", costs)
            gathered = costs.sizes["gathered plans"] + costs.sizes["gathered results"]
            is_met = sum(costs.seconds.values()) <= GOAL_SECONDS and gathered <= GOAL_BYTES
            print(f"    goal 2 CPU s and 20 MB gathered: {'met' if is_met else 'MISSED'}")


if __name__ == "__main__":
    main()
