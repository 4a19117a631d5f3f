"""Copies from the host that do not wait for the device."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to `device`, after the kernels that are queued there.

    On CUDA through pinned memory: a copy from pageable memory first waits for the stream, even with
    `non_blocking`.
    """
    device = torch.device(device)
    # A fake tensor, as in a dry run, has no memory that could be pinned.
    is_on_host = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    if device.type != "cuda" or not is_on_host:
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
