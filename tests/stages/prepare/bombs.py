"""Builds small columnar files that stand for far more data than they have bytes."""

import io
import struct

import pyarrow as pa
import pyarrow.parquet as pq

BOOLEAN, INT32, BYTE_ARRAY = 0, 1, 6
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
ZSTD = 6


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def compact(value):
    """(type, bytes) of a value in Thrift's compact protocol; a structure is a dict by field."""
    if isinstance(value, dict):
        out, last = b"", 0
        for field, part in value.items():
            kind, content = compact(part)
            out += bytes([(field - last) << 4 | kind]) + content
            last = field
        return 12, out + b"\0"
    if isinstance(value, list):
        parts = [compact(part) for part in value]
        kind = parts[0][0] if parts else 12
        count = (
            bytes([len(parts) << 4 | kind])
            if len(parts) < 15
            else (bytes([0xF0 | kind]) + varint(len(parts)))
        )
        return 9, count + b"".join(content for _, content in parts)
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    return 6 if isinstance(value, Long) else 5, varint(
        value << 1 if value >= 0 else (-value << 1) - 1
    )


class Long(int):
    """A number of 64 bits."""


def run(value, count, width=1):
    """A run of the hybrid encoding."""
    return varint(count << 1) + value.to_bytes((width + 7) // 8, "little")


def levels(*runs):
    content = b"".join(run(*each) for each in runs)
    return struct.pack("<I", len(content)) + content


def data_page(num_values, content, encoding=PLAIN, expanded=None, compressed=None):
    body = content if compressed is None else compressed
    header = {1: 0, 2: expanded or len(content), 3: len(body)}
    header[5] = {1: num_values, 2: encoding, 3: RLE, 4: RLE}
    return compact(header)[1] + body


def dictionary_page(content, compressed=None):
    body = content if compressed is None else compressed
    header = {1: 2, 2: len(content), 3: len(body), 7: {1: 1, 2: PLAIN}}
    return compact(header)[1] + body


def parquet_file(schema, pages, num_rows, num_values, kind, path, codec=0, has_dictionary=False):
    """A file of one column: elements of the schema, and bytes of all pages."""
    body = b"PAR1" + b"".join(pages)
    total = len(body) - 4
    chunk = {1: kind, 2: [PLAIN, RLE], 3: path, 4: codec, 5: Long(num_values)}
    chunk |= {6: Long(total), 7: Long(total)}
    chunk[9] = Long(4 + (len(pages[0]) if has_dictionary else 0))
    if has_dictionary:
        chunk[11] = Long(4)
    group = {1: [{2: Long(4), 3: chunk}], 2: Long(total), 3: Long(num_rows)}
    footer = compact({1: 1, 2: schema, 3: Long(num_rows), 4: [group]})[1]
    return body + footer + struct.pack("<I", len(footer)) + b"PAR1"


ROOT = {4: b"schema", 5: 1}


def text_column(repetition):
    return [ROOT, {1: BYTE_ARRAY, 3: repetition, 4: b"text", 6: 0}]


def dictionary_of_one_text(size=12_700_000, rows=1000):
    """A text that every row refers to."""
    text = struct.pack("<I", size) + b"a" * size
    packed = pa.Codec("zstd").compress(text, asbytes=True)
    content = bytes([1]) + run(0, rows)
    pages = [
        dictionary_page(text, packed),
        data_page(
            rows, content, RLE_DICTIONARY, None, pa.Codec("zstd").compress(content, asbytes=True)
        ),
    ]
    return parquet_file(
        text_column(REQUIRED), pages, rows, rows, BYTE_ARRAY, [b"text"], ZSTD, has_dictionary=True
    )


def null_rows(rows=10**9):
    pages = [data_page(rows, levels((0, rows)))]
    return parquet_file(text_column(OPTIONAL), pages, rows, rows, BYTE_ARRAY, [b"text"])


LIST = [
    ROOT,
    {3: OPTIONAL, 4: b"ids", 5: 1, 6: 3},
    {3: REPEATED, 4: b"list", 5: 1},
    {1: INT32, 3: OPTIONAL, 4: b"element"},
]


def long_list(values=10**9):
    """One row with a list of nulls."""
    content = levels((0, 1), (1, values - 1)) + levels((2, values, 2))
    path = [b"ids", b"list", b"element"]
    return parquet_file(LIST, [data_page(values, content)], 1, values, INT32, path)


def long_list_over_pages(values=10**6, pages=1000):
    first = data_page(values, levels((0, 1), (1, values - 1)) + levels((2, values, 2)))
    more = data_page(values, levels((1, values)) + levels((2, values, 2)))
    path = [b"ids", b"list", b"element"]
    parts = [first, *[more] * (pages - 1)]
    return parquet_file(LIST, parts, 1, values * pages, INT32, path)


def page_of_zeros(size=1 << 30):
    """A page whose header claims what its compressed bytes do not have."""
    packed = pa.Codec("zstd").compress(bytes(1 << 20), asbytes=True)
    pages = [data_page(1, bytes(4), PLAIN, size, packed)]
    return parquet_file(text_column(REQUIRED), pages, 1, 1, BYTE_ARRAY, [b"text"], ZSTD)


def shared_prefixes(rows=400, size=1 << 20):
    out = io.BytesIO()
    texts = ["a" * size + str(i) for i in range(rows)]
    pq.write_table(
        pa.table({"text": texts}),
        out,
        use_dictionary=False,
        compression="zstd",
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
    )
    return out.getvalue()


def many_columns(columns=300_000):
    element = compact({1: INT32, 3: 0, 4: b"a"})[1]
    schema = compact({4: b"schema", 5: columns})[1] + element * columns
    footer = b"\x15\x02\x19\xfc" + varint(columns + 1) + schema + b"\x16\0\x19\x0c\0"
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def arrow_file(batch, **options):
    out = io.BytesIO()
    with pa.ipc.new_file(out, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def arrow_column(array, **options):
    return arrow_file(pa.record_batch({"text": array}), **options)


def claimed_buffer(size=1 << 40):
    text = "word " * 10_000
    content = arrow_column(pa.array([text]), compression="zstd")
    before = struct.pack("<q", len(text))
    assert content.count(before) >= 1
    return content.replace(before, struct.pack("<q", size))


def long_list_of_nulls(length=(1 << 31) - 1):
    offsets = pa.array([0, length], pa.int32())
    return arrow_column(pa.ListArray.from_arrays(offsets, pa.nulls(length)))


def views_of_one_list(rows=20_000, length=100_000):
    offsets, sizes = pa.array([0] * rows, pa.int32()), pa.array([length] * rows, pa.int32())
    return arrow_column(
        pa.ListViewArray.from_arrays(offsets, sizes, pa.array(range(length), pa.int32()))
    )


def indices_of_one_text(rows=10**5, size=1 << 18):
    indices = pa.repeat(pa.scalar(0, pa.int32()), rows)
    return arrow_column(pa.DictionaryArray.from_arrays(indices, ["a" * size]), compression="zstd")


def runs_of_one_text(rows=10**9, size=1 << 20):
    ends = pa.array([rows], pa.int32())
    return arrow_column(pa.RunEndEncodedArray.from_arrays(ends, ["a" * size]))


def null_rows_of_arrow(rows=10**9):
    return arrow_column(pa.nulls(rows))


def zeros_of_arrow(size=1 << 29):
    return arrow_column(pa.array(["a" * size]), compression="zstd")


def many_fields(fields=300_000):
    schema = pa.schema([pa.field("a", pa.int8(), metadata={"k": "v"})] * fields)
    return arrow_file(pa.record_batch([pa.nulls(0, pa.int8())] * fields, schema=schema))


CHEAP = {
    **dict.fromkeys(
        (dictionary_of_one_text, null_rows, long_list, long_list_over_pages, page_of_zeros),
        "parquet",
    ),
    **dict.fromkeys(
        (
            claimed_buffer,
            long_list_of_nulls,
            views_of_one_list,
            indices_of_one_text,
            runs_of_one_text,
            null_rows_of_arrow,
        ),
        "arrow",
    ),
}
"""Suffixes of the files, by function that makes them."""

DEAR = {
    **dict.fromkeys((shared_prefixes, many_columns), "parquet"),
    **dict.fromkeys((zeros_of_arrow, many_fields), "arrow"),
}
"""Those that take seconds."""
