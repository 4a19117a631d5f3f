"""All streams of a compressed file are read, or its damage is an error."""

import bz2
import gzip
import lzma

import pytest

from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import SourceFile

COMPRESS = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress}
HEAD, TAIL = b"first\n" * 100_000, b"second\n" * 100_000


def read(path):
    with SourceFile(path.name, path).open() as stream:
        return stream.read()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_stream_is_read_and_a_damaged_one_is_refused(tmp_path, suffix):
    path, compress = tmp_path / f"data.txt.{suffix}", COMPRESS[suffix]
    first, second = compress(HEAD), bytearray(compress(TAIL))
    path.write_bytes(first + second)
    assert read(path) == HEAD + TAIL
    second[0] ^= 1
    for damaged in (first + second, first + compress(TAIL)[:-9], first + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(StageError, match=rf"data.txt.{suffix} cannot be decompressed"):
            read(path)
