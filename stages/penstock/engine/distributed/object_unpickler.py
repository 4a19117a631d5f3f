"""What torch's object collectives may rebuild from the bytes that arrive.

`all_gather_object` and its kin, which distributed checkpoints use as well, unpickle what comes over
the network of the ranks. Neither gloo nor NCCL knows who sends it, and a pickle may name any
function to call. Here it may name records alone: dataclasses, named tuples, enumerations and
exceptions of torch's checkpoints and of this package, of modules that are loaded already, and a few
plain types. Tensors and arrays go as their bytes, for torch's own way is a pickle within the
pickle.
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

PLAIN = {
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set")),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),  # finds a layout by its name
    ("traceback", "FrameSummary"),
    ("traceback", "StackSummary"),
    *((__name__, name) for name in ("rebuild_tensor", "rebuild_array")),
}
"""By module and name: what is called with anything that a message says."""
RECORDS_OF = ("penstock.", "torch.distributed.checkpoint.")
"""Modules whose records are rebuilt."""
EXCEPTIONS_OF = ("builtins", "penstock", "torch")
"""Packages whose exceptions are."""
NUMBERS = "biufc"
"""Kinds of numpy's types that hold numbers alone."""


class ObjectPickler(pickle.Pickler):
    """Writes what `ObjectUnpickler` reads."""

    def reducer_override(self, obj: Any, /) -> Any:
        """Tensors of any device and arrays of numbers as their bytes; the rest as usual."""
        if type(obj) is torch.Tensor:
            data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return rebuild_tensor, (data.numpy().tobytes(), obj.dtype, tuple(obj.shape))
        if isinstance(obj, np.ndarray | np.generic) and obj.dtype.kind in NUMBERS:
            shape = obj.shape if isinstance(obj, np.ndarray) else None
            return rebuild_array, (obj.tobytes(), obj.dtype.str, shape)
        if isinstance(obj, BaseException):
            # Not as a library may have registered for exceptions (tblib does, for all of them).
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class ObjectUnpickler(pickle.Unpickler):
    """Rebuilds records and plain values, and raises UnpicklingError for anything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The class of this name, if it is one of those."""
        # Nothing is imported for the sake of a message.
        module = sys.modules.get(module_name)
        found = vars(module).get(global_name) if module else None
        if (module_name, global_name) in PLAIN or isinstance(found, torch.dtype):
            return found
        if isinstance(found, type) and found.__module__ == module_name and _is_record(found):
            return found
        raise pickle.UnpicklingError(
            f"{module_name}.{global_name} is no record that ranks may send one another"
        )


def rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the CPU from its bytes."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def rebuild_array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    """An array of numbers from its bytes; without a shape, one number of numpy's."""
    kind = np.dtype(dtype)
    if kind.kind not in NUMBERS:
        raise pickle.UnpicklingError(f"{dtype} is no type of numbers")
    found = np.frombuffer(bytearray(data), dtype=kind)
    return found[0] if shape is None else found.reshape(shape)


def _is_record(found: type) -> bool:
    if issubclass(found, BaseException):
        return found.__module__.partition(".")[0] in EXCEPTIONS_OF
    return found.__module__.startswith(RECORDS_OF) and (
        dataclasses.is_dataclass(found)
        or issubclass(found, enum.Enum)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )


def restrict_pickling() -> None:
    """Have all object collectives of this process rebuild nothing else."""
    distributed_c10d._pickler = ObjectPickler
    distributed_c10d._unpickler = ObjectUnpickler
