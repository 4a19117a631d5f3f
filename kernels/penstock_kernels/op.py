"""An operation: a reference, its fast implementations, and their unsupported inputs. No mutable
state.

Calling an operation reads no flags and no context variables, so that `torch.compile` with
`fullgraph=True` can trace through it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run in Triton's interpreter: correct, on any machine, and very slow."""

# Whether this PyTorch was built for CUDA; does not query a driver. False for ROCm, where no kernel
# has been tried.
HAS_CUDA_BUILD = torch.backends.cuda.is_built() and torch.version.hip is None

# Triton is published for Linux only; elsewhere the operations have no such backend.
HAS_TRITON = find_spec("triton") is not None


class UnsupportedError(RuntimeError):
    """A backend that was selected by name does not support the inputs or the machine."""


@dataclass(frozen=True)
class KernelImpl(Generic[P, R]):
    """A fast implementation; `unsupported_reason` says why inputs are not supported, or None."""

    run: Callable[P, R]
    unsupported_reason: Callable[P, str | None]
    language: Literal["torch", "triton"] = "torch"
    missing_reason: str | None = None
    """Why it is not available on this machine, independent of inputs."""

    @property
    def is_auto_selectable(self) -> bool:
        """Interpreted kernels run only by name, in tests; they are never selected automatically."""
        runs = self.language == "torch" or (HAS_CUDA_BUILD and not INTERPRETED)
        return self.missing_reason is None and runs


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """Calling it selects a backend automatically; `backend` selects one by name."""

    name: str
    reference: Callable[P, R]
    fast: Mapping[str, KernelImpl[P, R]]
    """Fast implementations by name, in order of preference."""
    reference_name: str = "reference"
    """The reference's name for users, if it has its own."""
    available: tuple[KernelImpl[P, R], ...] = field(init=False, repr=False, compare=False)
    """Implementations that may be selected on this machine. Computed once: a small operation takes
    no longer than a few such checks."""

    def __post_init__(self) -> None:
        available = tuple(backend for backend in self.fast.values() if backend.is_auto_selectable)
        object.__setattr__(self, "available", available)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first fast backend that supports the inputs, else the reference."""
        for backend in self.available:
            if backend.unsupported_reason(*args, **kwargs) is None:
                return backend.run(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def is_fast(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        reasons = (backend.unsupported_reason(*args, **kwargs) for backend in self.available)
        return any(reason is None for reason in reasons)

    @property
    def backends(self) -> tuple[str, ...]:
        """The names that `backend` accepts."""
        return ("auto", self.reference_name, *self.fast)

    def backend(self, name: str) -> Callable[P, R]:
        """This backend only. Call it once, when the model is built, not at every step.

        Raises:
            UnsupportedError: at once for an unknown name, and for a backend that is missing here;
                when called, for unsupported inputs, with the reason.
        """
        if name == "auto":
            return self
        if name == self.reference_name:
            return self.reference
        if name not in self.fast:
            have = ", ".join(self.backends)
            raise UnsupportedError(f"{self.name} has no backend {name!r}; it has {have}")
        fast = self.fast[name]
        if fast.missing_reason:
            raise UnsupportedError(f"{self.name} cannot run on {name}: {fast.missing_reason}")

        def run_or_raise(*args: P.args, **kwargs: P.kwargs) -> R:
            if reason := fast.unsupported_reason(*args, **kwargs):
                raise UnsupportedError(f"{self.name} cannot run on {name}: {reason}")
            return fast.run(*args, **kwargs)

        return run_or_raise


def triton_backend(
    function: str, unsupported_reason: Callable[..., str | None] | str
) -> dict[str, KernelImpl[..., Any]]:
    """The backend `triton` of an operation: a function of this package, as "module:function", and
    `unsupported_reason` or its name in the same module.

    Without Triton there is none, and the module cannot be imported.
    """
    if not HAS_TRITON:
        return {}
    # Imported by name, after the check: the module imports triton.
    module_name, name = function.split(":")
    module = import_module(f"penstock_kernels.{module_name}")
    is_name = isinstance(unsupported_reason, str)
    reason = getattr(module, unsupported_reason) if is_name else unsupported_reason
    return {"triton": KernelImpl(getattr(module, name), reason, language="triton")}


def cache_home() -> Path:
    """The user's folder for small cached files (XDG)."""
    if root := os.environ.get("PENSTOCK_CACHE_HOME"):
        return Path(root)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "penstock"


def needs_cuda(*tensors: torch.Tensor) -> str | None:
    """Common to all Triton kernels: they run on the current CUDA device, which is where Triton
    launches, or on a CPU when interpreted."""
    if INTERPRETED:
        return None
    devices = {tensor.device for tensor in tensors}
    if any(device.type != "cuda" for device in devices):
        kinds = sorted({device.type for device in devices})
        return f"its tensors are on {', '.join(kinds)}, and it needs cuda"
    current = torch.cuda.current_device()
    if any(device.index != current for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        return f"its tensors are on {names}, and cuda:{current} is the current device"
    return None


def tensors_among(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]


def tensors_need_cuda(*args: Any, **kwargs: Any) -> str | None:
    """`needs_cuda` of all tensors among the arguments of an operation."""
    return needs_cuda(*tensors_among(*args, **kwargs))


def supports_all(*args: object, **kwargs: object) -> None:
    """No reason: of a backend that supports whatever its reference does."""
    del args, kwargs


def needs_floats(*tensors: torch.Tensor) -> str | None:
    """Common to kernels that compute in fp32: wider dtypes are not supported."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"a tensor is in {tensor.dtype}, and it takes float32, bfloat16 and float16"
    return None
