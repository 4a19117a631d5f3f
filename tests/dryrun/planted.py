"""Faults on purpose: `python -m tests.dryrun.planted` prints what a dry run finds of each."""

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from penstock.core.machine.device_specs import DEVICES
from penstock.estimate.dryrun import fake_cuda
from penstock.estimate.dryrun.dispatch import DryRunMode
from penstock.estimate.dryrun.process_group import init_fake_process_group
from penstock.estimate.dryrun.roofline import Roofline
from penstock.estimate.dryrun.trace import Collective, HostSync, Launch, Trace

Plant = Callable[[torch.Tensor], object]


def _branch(x: torch.Tensor) -> int:
    return 1 if x.sum() > 0 else 0


def _backward(x: torch.Tensor) -> None:
    (x.requires_grad_() ** 2).sum().backward()


PLANTED: dict[str, Plant] = {
    "host tensor in all-reduce": lambda _: dist.all_reduce(torch.ones(3)),
    "non-contiguous all-reduce": lambda x: dist.all_reduce(x.t()),
    "empty all-reduce": lambda x: dist.all_reduce(x[:0]),
    "mixed devices": lambda x: torch.ops.aten.add_(x, torch.ones(x.shape)),
    "item": lambda x: x.sum().item(),
    "branch on a value": _branch,
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "tolist": lambda x: x.sum(0).tolist(),
    "blocking copy to the host": lambda x: x.cpu(),
    "copy to the host": lambda x: x.to("cpu", non_blocking=True),
    "blocking copy from the host": lambda x: torch.ones(4).to(x.device),
    "copy from the host": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "copy from pageable memory": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "tensor of a list": lambda x: torch.tensor([1, 2, 3], device=x.device),
    "repeat_interleave": lambda x: x.flatten().repeat_interleave(
        torch.ones(x.numel(), dtype=torch.int64, device=x.device)
    ),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "backward": _backward,
    "nothing": lambda x: x + 1,
}


def main() -> None:
    """Print, by name, the faults, syncs, copies, kernels and collectives of each."""
    trace = Trace()
    fake_cuda.install("h100", DEVICES["h100"], trace)
    init_fake_process_group(0, 8, 8)
    found: dict[str, dict[str, object]] = {}
    with DryRunMode(trace, Roofline(DEVICES["h100"], 8, [200])):
        for name, plant in PLANTED.items():
            trace.clear()
            trace.faults.clear()
            x = torch.ones(4, 6, device="cuda")
            trace.clear()
            raised = ""
            try:
                plant(x)
            except RuntimeError as error:
                raised = type(error).__name__
            launches = [record for record in trace.records if isinstance(record, Launch)]
            found[name] = {
                "raised": raised,
                "faults": [what for what, _ in trace.faults],
                "syncs": [r.call for r in trace.records if isinstance(r, HostSync)],
                "copies": [one.name for one in launches if one.kind == "copy"],
                "kernels": [one.name for one in launches if one.kind != "copy"],
                "collectives": [
                    record.name for record in trace.records if isinstance(record, Collective)
                ],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
