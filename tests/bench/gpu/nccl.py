"""Collectives of the engine's process group: on one GPU that they work, on several their speed.

Started without torchrun it takes all GPUs of the machine. Bandwidth is a ring's: of all-reduce
2 (n - 1) / n of the bytes a second, of the others (n - 1) / n.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from penstock.core import env
from penstock.engine.distributed.ranks import destroy_process_group, init_process_group
from tests.bench.figures import record
from tests.bench.timing import CUDA, DEVICE, medians


def measure(num_bytes: int) -> None:
    ranks = init_process_group(120)
    world = ranks.world_size
    mine = torch.full((num_bytes // 4,), float(ranks.rank + 1), device=DEVICE)
    gathered = torch.empty(world * len(mine), device=DEVICE)
    part = torch.empty(len(mine) // world, device=DEVICE)
    works: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: dist.all_reduce(mine.clone()), 2.0),
        "all_gather": (lambda: dist.all_gather_into_tensor(gathered, mine), float(world)),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, mine), 1.0),
        "all_to_all": (lambda: dist.all_to_all_single(torch.empty_like(mine), mine), 1.0),
    }
    if not CUDA:  # gloo has no reduce_scatter of tensors
        del works["reduce_scatter"]
    total = mine[:1].clone()
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2, "all_reduce summed wrongly"
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.view(world, -1)[:, 0].tolist() == [rank + 1.0 for rank in range(world)]
    found = medians({name: work for name, (work, _) in works.items()})
    if ranks.is_main_process:
        print(f"{world} ranks, {dist.get_backend()}, {num_bytes / 2**20:g} MiB")
        for name, seconds in found.items():
            line = f"{name:16} {seconds * 1e3:8.3f} ms"
            record(f"{name} on {world} ranks", seconds * 1e3, "ms")
            if world > 1:
                rate = works[name][1] * (world - 1) / world * num_bytes / seconds
                record(f"{name} on {world} ranks", rate / 1e9, "GB/s")
                line += f"  {rate / 1e9:7.1f} GB/s"
            print(line)
    split = dist.new_group([0])
    if ranks.is_main_process:
        dist.all_reduce(total, group=split)
        print("a group of its own: works")
    destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    count = torch.cuda.device_count() if CUDA else 2
    if env.rank_variables() is None and count > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        command = [sys.executable, *launcher, "-m", "tests.bench.gpu.nccl", *["--dry"] * dry]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    measure(2**12 if dry else 2**28)


if __name__ == "__main__":
    main()
