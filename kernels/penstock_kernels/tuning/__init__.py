"""Autotuning of Triton kernels: tile sizes and warps, measured at first use on a device, then
cached.

A kernel has a rule that gives a good choice for every shape, and may have a few other candidates.
Candidates do not change the order of sums, so the choice does not change results: ranks agree,
and a run that resumes elsewhere is identical. Kernels whose order would change have only a rule.

Files are `tuning/<device>.json` in the folder that PENSTOCK_CACHE_HOME names, else in `penstock` in
the user's cache folder.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from penstock_kernels.op import INTERPRETED, cache_home
from penstock_kernels.tuning.autotune_cache import AutotuneCache, AutotuneKey, Device
from penstock_kernels.tuning.tuner import Autotuner, Candidate, size_class

__all__ = ["select_config", "shared_memory_per_block"]

FOLDER = "tuning"
UNLIMITED = 2**30


def select_config(
    kernel: Any,
    like: torch.Tensor,
    sizes: Sequence[int],
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], Any],
    kind: str = "",
) -> Candidate:
    """The candidate with which a Triton kernel is launched; the first one is the rule's choice.

    Args:
        like: a tensor of the launch, for its device and dtype.
        sizes: those that determine the time of a launch. They are rounded up to powers of two.
        run: launches with a candidate, and writes the same each time.
        kind: other properties of a launch.

    Nothing is measured in the interpreter, with deterministic algorithms, or during CUDA graph
    capture.
    """
    if INTERPRETED or len(candidates) == 1 or not like.is_cuda:
        return candidates[0]
    if torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    inputs = f"{str(like.dtype).removeprefix('torch.')} {size_class(sizes)} {kind}".strip()
    # Kernels of two folders may have one name.
    name = f"{kernel.__module__.split('.')[-2]}.{kernel.__name__.strip('_')}"
    return _tuner(like.device).choose(
        AutotuneKey(name, _made_by(kernel), inputs),
        candidates,
        run,
        may_measure=not torch.cuda.is_current_stream_capturing(),
    )


@cache
def _tuner(device: torch.device) -> Autotuner:
    # Importable only with Triton.
    from penstock_kernels.tuning.benchmark import microseconds  # noqa: PLC0415

    name = torch.cuda.get_device_name(device)
    kind = Device(name, torch.cuda.get_device_capability(device))
    return Autotuner(AutotuneCache(cache_home() / FOLDER, kind), microseconds)


@cache
def _made_by(kernel: Any) -> str:
    import triton  # noqa: PLC0415

    # The hash of its source, and of all functions that it calls.
    return f"triton {triton.__version__}, {kernel.cache_key[:16]}"


@cache
def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that one thread block may use, opting in: what a kernel's tiles, times
    its pipeline stages, must fit into. Without limit where it is no GPU."""
    if device.type != "cuda":
        return UNLIMITED
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
