"""CUDA device registration without a GPU, so that autograd accepts fake CUDA tensors.

Autograd asks the device guard and the hooks of an accelerator for streams. Without a GPU there is
no guard for CUDA, and a backward pass over fake CUDA tensors aborts the process. Both are C++
objects with virtual tables, so ctypes can replace them, and no compiler is needed:

- `c10::impl::ensureCUDADeviceGuardSet` registers PyTorch's own no-op guard if the registered guard
  reports no devices. A temporary guard whose every method returns 0 makes it do so.
- `at::accelerator::getAccelerator` asks three methods of the CUDA hooks, the first ones after the
  destructors in `AcceleratorHooksInterface`; they are redirected to a function that returns 1.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.core.errors import CapabilityError

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""`c10::impl::device_guard_impl_registry`: one pointer per device type."""
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
"""`at::detail::getCUDAHooks()`."""
_CUDA = 1
"""`c10::DeviceType::CUDA`."""
_GUARD_METHODS = 64
"""At least as many as `DeviceGuardImplInterface` has."""
_HOOK_METHODS = 128
"""At least as many as `CUDAHooksInterface` has; the copied table may be longer."""
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
"""First and last of the redirected methods: isBuilt, isAvailable, hasPrimaryContext."""


def register_cuda_device() -> None:
    """Make autograd accept fake CUDA tensors in this process; do nothing where a GPU is available.

    Raises CapabilityError if this build of PyTorch has another layout. There is no way back: use it
    in a process of its own.
    """
    if torch.cuda.is_available():
        return
    try:
        _register_guard()
        _redirect_hooks()
    except (OSError, ValueError, AttributeError) as error:
        raise _unsupported(str(error)) from error
    if str(torch._C._get_accelerator()) != "cuda":
        raise _unsupported("CUDA is not the accelerator after registration")


def _register_guard() -> None:
    registry = (ctypes.c_void_p * (_CUDA + 1)).in_dll(_library("c10"), _GUARDS)
    zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    table = _table([ctypes.cast(zero, ctypes.c_void_p).value] * _GUARD_METHODS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    registry[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] == ctypes.addressof(guard):
        raise ValueError("the no-op guard was not registered")


def _redirect_hooks() -> None:
    get_hooks = getattr(_library("torch_cpu"), _HOOKS)
    get_hooks.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(get_hooks())
    assert pointer.value
    table = _table([*(ctypes.c_void_p * _HOOK_METHODS).from_address(pointer.value)])
    # A C function, because autograd's threads call it without the interpreter lock.
    hook = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    for method in range(_IS_BUILT, _HAS_PRIMARY_CONTEXT + 1):
        table[method] = hook
    pointer.value = ctypes.addressof(table)


def _table(methods: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    table = (ctypes.c_void_p * len(methods))(*methods)
    # Never freed: PyTorch uses it even after the interpreter is finalized.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    return table


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))


def _unsupported(why: str) -> CapabilityError:
    return CapabilityError(
        f"a dry run cannot stand in for CUDA in PyTorch {torch.__version__}: {why}.\n"
        "  Use Linux with the PyTorch version of constraints.txt."
    )
