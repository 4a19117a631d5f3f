"""What programs are compiled with on this machine."""

import shutil

import torch

from penstock.core.errors import CapabilityError
from penstock_kernels.op import HAS_TRITON

COMPILERS = ("g++", "clang++")


def require_compiler(device: torch.device, wish: str, instead: str) -> None:
    """Refuse a `wish` where nothing compiles for the device; `instead` says what to write.

    Raises:
        CapabilityError: so.
    """
    if device.type == "cpu":
        if any(map(shutil.which, COMPILERS)):
            return
        missing = f"none of {', '.join(COMPILERS)} is in the PATH"
    elif HAS_TRITON:
        return
    else:
        missing = "Triton is not installed"
    raise CapabilityError(
        f"{wish}, and nothing compiles for {device.type} here: {missing}.\n  {instead}"
    )
