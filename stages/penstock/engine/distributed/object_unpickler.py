"""Restricted unpickling for torch's object collectives.

`all_gather_object` and related functions, which distributed checkpoints use as well, unpickle bytes
from the network of the ranks. Neither gloo nor NCCL authenticates the sender, and a pickle may call
any function. This unpickler accepts only records: dataclasses, named tuples, enumerations and
exceptions of torch's checkpoints and of this package, from modules that are already imported, and a
few plain types. Tensors and arrays are sent as bytes, because torch's own way is a pickle within
the pickle.
"""

import dataclasses
import enum
import math
import pickle
import sys
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d

ALLOWED_NAMES = {
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set")),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),  # looks up a layout by name
    ("traceback", "FrameSummary"),
    ("traceback", "StackSummary"),
    *((__name__, name) for name in ("rebuild_tensor", "rebuild_array")),
}
"""Allowed by module and name: functions that a message may call with any arguments."""
RECORD_MODULES = ("penstock.", "torch.distributed.checkpoint.")
EXCEPTION_PACKAGES = ("builtins", "penstock", "torch")
NUMERIC_KINDS = "biufc"
"""Numpy dtype kinds that hold only numbers."""


class ObjectPickler(pickle.Pickler):
    """Writes what `ObjectUnpickler` reads."""

    def reducer_override(self, obj: Any, /) -> Any:
        if type(obj) is torch.Tensor:
            # As bytes: NumPy has no bfloat16.
            data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return rebuild_tensor, (data.numpy().tobytes(), obj.dtype, tuple(obj.shape))
        if isinstance(obj, np.ndarray | np.generic) and obj.dtype.kind in NUMERIC_KINDS:
            shape = obj.shape if isinstance(obj, np.ndarray) else None
            return rebuild_array, (obj.tobytes(), obj.dtype.str, shape)
        if isinstance(obj, BaseException):
            # Not with a reducer that a library registered: tblib does for all exceptions.
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, enum.Enum):
            # Python 3.11.0 to 3.11.3 would write a call of getattr.
            return type(obj), (obj.value,)
        return NotImplemented


class ObjectUnpickler(pickle.Unpickler):
    """Rebuilds records and plain values; raises UnpicklingError for anything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # Python 3.13's module of the classes that are `pathlib`'s before and after it.
        module_name = "pathlib" if module_name == "pathlib._local" else module_name
        # A message must never trigger an import.
        module = sys.modules.get(module_name)
        value = vars(module).get(global_name) if module else None
        if (module_name, global_name) in ALLOWED_NAMES or isinstance(value, torch.dtype):
            return value
        if isinstance(value, type) and value.__module__ == module_name and _is_record(value):
            return value
        raise pickle.UnpicklingError(
            f"{module_name}.{global_name} is not a type that ranks may send to one another"
        )


def rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor from its bytes."""
    # `frombuffer` rejects an empty buffer.
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def rebuild_array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    """A numeric array from its bytes; without a shape, a numpy scalar."""
    kind = np.dtype(dtype)
    if kind.kind not in NUMERIC_KINDS:
        raise pickle.UnpicklingError(f"{dtype} is not a numeric dtype")
    # A copy: arrays over `bytes` cannot be written to.
    array = np.frombuffer(bytearray(data), dtype=kind)
    return array[0] if shape is None else array.reshape(shape)


def _is_record(cls: type) -> bool:
    if issubclass(cls, BaseException):
        return cls.__module__.partition(".")[0] in EXCEPTION_PACKAGES
    return cls.__module__.startswith(RECORD_MODULES) and (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, enum.Enum)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def restrict_pickling() -> None:
    """Restrict unpickling in all object collectives of this process."""
    # Private names: object collectives take no pickler of the caller's (torch 2.13).
    distributed_c10d._pickler = ObjectPickler
    distributed_c10d._unpickler = ObjectUnpickler
