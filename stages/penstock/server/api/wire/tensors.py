"""Decode tensors from JSON and protobuf to numpy arrays.

Sparse tensors are densified up to a size limit, because a few bytes can claim any shape. JSON has
no non-finite numbers; in protobuf they are passed through, because the scheduler knows which tokens
are masked.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.server.api.errors import ApiError
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.protocol.types import Array, DType

MAX_NUMBERS = 1 << 24
"""Maximum number of values of all tensors of one request after densifying: 16 million."""

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")

_PROTO = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}

Numbers = npt.NDArray[np.int64 | np.float32]


def from_list(data: Sequence[Any], loc: str) -> Numbers:
    """Convert nested lists of numbers: int64 if all are integers, else float32. `loc` names them in
    the ApiError raised if they are not numbers, ragged, or too large."""
    # First as objects: in a string array, one long string would make every element as long.
    try:
        values = np.asarray(data, dtype=object)
    except ValueError as error:
        raise ApiError(f"{loc} is no array of numbers, all rows of one length") from error
    kinds = set(map(type, values.reshape(-1).tolist()))
    if not kinds:
        return np.zeros(values.shape, np.float32)
    if list in kinds:
        raise ApiError(f"{loc} is no array of numbers, all rows of one length")
    try:
        if kinds <= {int, bool}:
            return values.astype(np.int64)
        if kinds <= {int, bool, float}:
            return _finite(values.astype(np.float64), loc)
    except OverflowError:
        pass
    raise ApiError(f"{loc} holds what is no number of 64 bits")


def from_json(tensor: Mapping[str, Any], loc: str) -> Numbers:
    """Decode a tensor with `data`, `dtype`, `shape`, and if sparse `sparse_crow_indices` and
    `sparse_col_indices`. Raises ApiError if they are inconsistent."""
    data, dtype = tensor.get("data"), tensor.get("dtype", "float32")
    if not isinstance(data, list):
        raise ApiError(f"{loc} has no data")
    if dtype not in (*FLOATS, *INTEGERS):
        raise ApiError(f"{loc} is of type {str(dtype)[:50]!r}: send float32 or int64")
    values = from_list(data, loc)
    if dtype in FLOATS:
        values = values.astype(np.float32)
    shape = _shape(tensor.get("shape"), loc)
    rows, columns = tensor.get("sparse_crow_indices"), tensor.get("sparse_col_indices")
    if rows is None and columns is None:
        return _shaped(values, shape, loc)
    if not isinstance(rows, list) or not isinstance(columns, list):
        raise ApiError(f"{loc} needs sparse_crow_indices and sparse_col_indices, or neither")
    indices = [to_integers(from_list(pointers, loc), loc) for pointers in (rows, columns)]
    return _dense(values, indices[0], indices[1], shape, loc)


def from_proto(tensor: pb.Tensor, loc: str) -> Numbers:
    """Decode a tensor of the SDK. Raises ApiError if it is inconsistent."""
    if tensor.dtype not in _PROTO:
        raise ApiError(f"{loc} is of type {tensor.dtype}, which is none that is known")
    shape = _shape(list(tensor.shape), loc) if tensor.shape else None
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return _shaped(_read(tensor.dense, tensor.dtype, loc), shape, loc)
    sparse = tensor.sparse_csr
    rows, columns = (
        to_integers(_read(pointers, pb.DTYPE_INT64, loc), loc)
        for pointers in (sparse.crow_indices, sparse.col_indices)
    )
    return _dense(_read(sparse.values, tensor.dtype, loc), rows, columns, shape, loc)


def shape_from_json(tensor: Any, loc: str) -> tuple[int, ...]:
    """The dense shape of a JSON tensor without reading its values: all rows of a nested list count
    as long as the first. Raises ApiError for a shape over the limit."""
    if isinstance(tensor, list):
        first = tensor[0] if tensor else None
        return (len(tensor), len(first)) if isinstance(first, list) else (len(tensor),)
    if not isinstance(tensor, Mapping):
        return ()
    shape = _shape(tensor.get("shape"), loc)
    data = tensor.get("data")
    return shape if shape is not None else (len(data) if isinstance(data, list) else 0,)


def shape_from_proto(tensor: pb.Tensor, loc: str) -> tuple[int, ...]:
    """The dense shape of a tensor of the SDK. Raises ApiError for one over the limit."""
    shape = _shape(list(tensor.shape), loc) if tensor.shape else None
    kind = _PROTO.get(tensor.dtype)
    return shape if shape is not None else (len(tensor.dense) // (kind.itemsize if kind else 1),)


def tokens_from_bytes(data: bytes, loc: str) -> npt.NDArray[np.int64]:
    """Tokens in the SDK's encoding: int32, little-endian."""
    return to_integers(_read(data, pb.DTYPE_INT32, loc), loc)


def per_token(numbers: Numbers, length: int, loc: str) -> npt.NDArray[Any]:
    """One value per token, [T]; also accepts [1, T] and [T, 1]. Raises ApiError."""
    if numbers.size != length or max(numbers.shape, default=0) != length:
        raise ApiError(
            f"{loc} is {list(numbers.shape)} for {length} tokens: send one number for each"
        )
    return numbers.reshape(length)


def per_target(numbers: Numbers, shape: tuple[int, ...], loc: str) -> npt.NDArray[Any]:
    """One value per target, [T] or [T, K]; one per token is broadcast. Raises ApiError."""
    if numbers.shape == shape:
        return numbers
    values = per_token(numbers, shape[0], loc)
    return values if len(shape) == 1 else np.broadcast_to(values[:, None], shape)


def to_integers(numbers: Numbers, loc: str) -> npt.NDArray[np.int64]:
    """Integer values such as tokens. Raises ApiError for fractions."""
    if numbers.dtype.kind == "f":
        # float32 holds all whole numbers up to 2^24, and beyond it only some.
        if numbers.size and (np.any(numbers != np.floor(numbers)) or np.abs(numbers).max() > 2**24):
            raise ApiError(f"{loc} holds fractions, and is to hold whole numbers")
        return numbers.astype(np.int64)
    return numbers.astype(np.int64, copy=False)


def token_array(tokens: npt.NDArray[np.int64], loc: str, dtype: DType = "int32") -> Array:
    """Tokens of any shape. Raises ApiError for ids outside every vocabulary."""
    if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise ApiError(f"{loc} holds {tokens.min()} to {tokens.max()}, which are no tokens")
    return Array.of(tokens, dtype)


def _read(data: bytes, dtype: Any, loc: str) -> Numbers:
    kind = _PROTO[dtype]
    if len(data) % kind.itemsize:
        raise ApiError(f"{loc} has {len(data)} bytes, and each number takes {kind.itemsize}")
    numbers = np.frombuffer(data, kind)
    if dtype == pb.DTYPE_BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32 if numbers.dtype.kind == "f" else np.int64)


def _finite(numbers: npt.NDArray[Any], loc: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = numbers.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(cast.reshape(-1)))
    if wrong.size:
        raise ApiError(
            f"{loc} is {numbers.reshape(-1)[wrong[0]]} at {wrong[0]}, which is no float32 that is"
            " finite; nothing was computed of it"
        )
    return cast


def _shape(shape: Any, loc: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    counts = shape if isinstance(shape, list) else []
    wrong = any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts)
    if not isinstance(shape, list) or wrong or len(counts) > 4:
        raise ApiError(f"{loc} has no shape of up to four counts")
    # Counts zero dimensions as 1: an empty tensor may not have 2^60 rows.
    if math.prod(max(n, 1) for n in counts) > MAX_NUMBERS:
        raise ApiError(f"{loc} has over {MAX_NUMBERS} numbers; send less at once")
    return tuple(counts)


def _shaped(numbers: Numbers, shape: tuple[int, ...] | None, loc: str) -> Numbers:
    if shape is None:
        return numbers
    if numbers.size != math.prod(shape):
        raise ApiError(f"{loc} has {numbers.size} numbers for a shape of {list(shape)}")
    return numbers.reshape(shape)


def _dense(
    values: Numbers,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    shape: tuple[int, ...] | None,
    loc: str,
) -> Numbers:
    # Densify compressed sparse rows (CSR): row r has the entries rows[r]..rows[r + 1].
    if shape is None or len(shape) != 2:
        raise ApiError(f"{loc} is sparse, and needs a shape of rows and columns")
    fits = (
        rows.shape == (shape[0] + 1,)
        and columns.shape == values.shape
        and values.ndim == 1
        and rows[0] == 0
        and rows[-1] == len(values)
        # Differences of values within these bounds do not overflow.
        and bool(np.all((rows >= 0) & (rows <= len(values))))
        and bool(np.all(np.diff(rows) >= 0))
        and bool(np.all((columns >= 0) & (columns < shape[1])))
    )
    if fits:
        flat_indices = np.repeat(np.arange(shape[0]), np.diff(rows)) * shape[1] + columns
        # A duplicate position would have an ambiguous value.
        if bool(np.all(np.diff(flat_indices) > 0)):
            full = np.zeros(shape, values.dtype)
            full.reshape(-1)[flat_indices] = values
            return full
    raise ApiError(f"{loc} has indices of no compressed sparse rows of {list(shape)}")
