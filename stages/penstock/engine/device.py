"""The device on which this process computes: the only place that chooses one."""

import torch

CPU = torch.device("cpu")


def accelerator() -> torch.device:
    """The kind of accelerator here (`cuda`, also for ROCm; `mps`, `xpu`), or the CPU: for models
    that are run by transformers alone."""
    return torch.accelerator.current_accelerator(check_available=True) or CPU


def uses_cuda() -> bool:
    """Whether ranks compute with CUDA or ROCm."""
    return accelerator().type == "cuda"


def rank_device(local_rank: int) -> torch.device:
    """The device of a rank: of CUDA or ROCm, or the CPU."""
    # Gloo has no collectives for other accelerators, and MPS no float64, in which losses and norms
    # are summed.
    if not uses_cuda():
        return CPU
    # A scheduler may show each process only its own device, as number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def empty_cache() -> None:
    """Return the memory that PyTorch caches to the GPU; nothing on a CPU."""
    if uses_cuda():
        torch.cuda.empty_cache()
