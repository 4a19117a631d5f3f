"""Bytes that the rows of Arrow arrays take once they are Python values.

Dictionaries, views, runs and nulls have far more values than bytes.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

VALUE_BYTES = 8
"""Of a number, and beside the content of a text or list."""

ROW_BYTES = 64
"""Beside the values of a row."""

TEXT_KINDS = (
    *(pa.types.is_string, pa.types.is_binary),
    *(pa.types.is_large_string, pa.types.is_large_binary),
)

Sizes = int | np.ndarray
"""Of each row; a number if all are equal. Never larger than the buffers of an array."""


def batch_sizes(batch: pa.RecordBatch) -> Sizes:
    """Upper bounds of the bytes of each row."""
    return sum((row_sizes(column) for column in batch.columns), ROW_BYTES)


def row_sizes(array: Any) -> Sizes:
    """Upper bounds of the bytes of each value of an Arrow array."""
    kind: pa.DataType = array.type
    if isinstance(array, pa.ExtensionArray):
        return row_sizes(array.storage)
    if pa.types.is_dictionary(kind):
        sizes = row_sizes(array.dictionary)
        # fill_null: where a value is null, Arrow leaves any number as its index.
        return sizes if isinstance(sizes, int) else sizes[_numbers(array.indices.fill_null(0))]
    if pa.types.is_struct(kind):
        return sum((row_sizes(array.field(i)) for i in range(kind.num_fields)), VALUE_BYTES)
    if pa.types.is_run_end_encoded(kind):
        return _largest(row_sizes(array.values))
    if pa.types.is_union(kind):
        return sum(_largest(row_sizes(array.field(i))) for i in range(kind.num_fields))
    if pa.types.is_nested(kind):
        return _list_sizes(array)
    if any(is_kind(kind) for is_kind in TEXT_KINDS):
        return VALUE_BYTES + _numbers(pc.call_function("binary_length", [array]).fill_null(0))
    if kind in (pa.string_view(), pa.binary_view()):
        # A view has 16 bytes; the first four are the length.
        lengths = np.frombuffer(array.buffers()[1], np.int32)[::4]
        return VALUE_BYTES + lengths[array.offset : array.offset + len(array)].astype(np.int64)
    return VALUE_BYTES + (kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0)


def _list_sizes(array: Any) -> Sizes:
    kind = array.type
    if pa.types.is_map(kind):
        items = (array.keys, array.items)
        return sum(_summed(row_sizes(values), array.offsets) for values in items)
    if pa.types.is_fixed_size_list(kind):
        sizes = row_sizes(array.values)
        if isinstance(sizes, int) or not kind.list_size:
            return VALUE_BYTES + kind.list_size * _largest(sizes)
        starts = (array.offset + np.arange(len(array), dtype=np.int64)) * kind.list_size
        return _between(sizes, starts, starts + kind.list_size)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        starts, lengths = _numbers(array.offsets), _numbers(array.sizes)
        return _between(row_sizes(array.values), starts, starts + lengths)
    return _summed(row_sizes(array.values), array.offsets)


def _numbers(array: Any) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False).astype(np.int64)


def _summed(sizes: Sizes, offsets: Any) -> Sizes:
    bounds = _numbers(offsets)
    return _between(sizes, bounds[:-1], bounds[1:])


def _between(sizes: Sizes, starts: np.ndarray, stops: np.ndarray) -> Sizes:
    """Sums of the sizes from each start to each stop."""
    if isinstance(sizes, int):
        return VALUE_BYTES + sizes * (stops - starts)
    before = np.concatenate([[0], np.cumsum(sizes)])
    return VALUE_BYTES + before[stops] - before[starts]


def _largest(sizes: Sizes) -> int:
    return sizes if isinstance(sizes, int) else int(sizes.max(initial=0))
