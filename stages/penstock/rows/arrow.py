"""Arrow files and arrays, without pandas.

`pa.array` and `Array.to_numpy` import it where it is installed: a second for every rank and data
loader process, and a third of the time of a short stage.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow.lib import StringBuilder

from penstock.core.errors import ArtifactError
from penstock.rows.schema import IGNORED, LOSS_WEIGHTS

Tokens = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Number = TypeVar("Number", np.int32, np.int64, np.float32, np.float64)


def to_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Numbers, which are not copied if they are contiguous, or booleans, as an array."""
    # Arrow has eight booleans in a byte, the first in the lowest bit.
    is_bits = values.dtype == np.bool_
    content = np.packbits(values, bitorder="little") if is_bits else np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(content)])


def binary_array(values: Sequence[bytes], size: int) -> pa.Array:
    """Values of `size` bytes each as an array."""
    content = pa.py_buffer(b"".join(values))
    return pa.Array.from_buffers(pa.binary(size), len(values), [None, content])


def string_array(values: Sequence[str | None]) -> pa.StringArray:
    """Strings and nulls as an array."""
    builder = StringBuilder()
    builder.append_values(values)
    return builder.finish()


def source_array(rows: int, label: int, labels: Sequence[str]) -> pa.DictionaryArray:
    """The column `source` of rows of one data set, `labels[label]`."""
    indices = to_arrow(np.full(rows, label, dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, string_array(labels))


def list_array(offsets: npt.NDArray[np.integer], values: pa.Array) -> pa.ListArray:
    """Lists of values; list k is `values[offsets[k]:offsets[k + 1]]`."""
    return pa.ListArray.from_arrays(to_arrow(offsets.astype(np.int32)), values)


def to_numpy(numbers: pa.Array, dtype: type[Number]) -> npt.NDArray[Number]:
    """View an array without nulls."""
    assert numbers.type == pa.from_numpy_dtype(dtype)
    assert not numbers.null_count
    _, buffer = numbers.buffers()
    # Arrow may leave out the buffer of an empty array.
    if buffer is None:
        return np.empty(0, dtype)
    offset = numbers.offset * np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype, count=len(numbers), offset=offset)


def flat(lists: pa.ListArray) -> tuple[Tokens, Tokens]:
    """A list column as (values, offsets into them), both views of Arrow's memory."""
    # Not `flatten()`, which begins at the first list of a slice, where `offsets` do not begin at 0.
    return to_numpy(lists.values, np.int32), to_numpy(lists.offsets, np.int32)


def loss_weights(batch: pa.RecordBatch) -> tuple[Weights, Tokens] | None:
    """The loss weights as (values, offsets into them), as views; None if all labels weigh 1."""
    if LOSS_WEIGHTS.name not in batch.schema.names:
        return None
    lists = batch.column(LOSS_WEIGHTS.name)
    return to_numpy(lists.values, np.float32), to_numpy(lists.offsets, np.int32)


def with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of prepared samples in `schema`: without columns of images these are empty lists,
    and without loss weights these are 1 for every label."""
    if batch.schema.names == schema.names:
        return batch
    columns: list[pa.Array] = []
    for field in schema:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name))
        elif field == LOSS_WEIGHTS:
            labels = batch.column("labels")
            weights = (to_numpy(labels.values, np.int32) != IGNORED).astype(np.float32)
            columns.append(pa.ListArray.from_arrays(labels.offsets, to_arrow(weights)))
        else:
            empty = pa.Array.from_buffers(field.type.value_type, 0, [None, pa.py_buffer(b"")])
            columns.append(list_array(np.zeros(batch.num_rows + 1, np.int32), empty))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def map_batches(path: Path, remedy: str = "Build it again with --force.") -> list[pa.RecordBatch]:
    """The record batches of an Arrow IPC file, memory-mapped.

    Raises ArtifactError if the file is truncated or is not an Arrow IPC file.
    """
    try:
        # The map stays open as long as a batch refers to it.
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(f"{path} cannot be read as Arrow: {error}\n  {remedy}") from error
