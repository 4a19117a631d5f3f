"""A tar file is read up to its proven end: no damage loses records without an error."""

import gzip
import tarfile

import pytest

from penstock.core.errors import StageError
from penstock.prepare.readers.archive import tar_records
from penstock.prepare.readers.decompress import SourceFile
from tests.stages.tars import tar_of

ROWS = 6
BLOCK = tarfile.BLOCKSIZE


def shard(rows=ROWS, long_name="", **options):
    return tar_of(({"text": f"row {i}"} for i in range(rows)), long_name, **options)


def records(path):
    chunks = tar_records(SourceFile(path.name, path))
    return [chunk.values()[i] for chunk in chunks for i in range(len(chunk))]


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


WHOLE = shard()
HEADERS = range(0, 2 * BLOCK * ROWS, 2 * BLOCK)
END = 2 * BLOCK * ROWS
DAMAGED = {
    **{f"a bit of header {i}": flipped(WHOLE, at + 3) for i, at in enumerate(HEADERS)},
    **{
        f"zeros for header {i}": WHOLE[:at] + bytes(BLOCK) + WHOLE[at + BLOCK :]
        for i, at in enumerate(HEADERS)
    },
    **{
        f"two blocks of zeros before {i}": WHOLE[:at] + bytes(2 * BLOCK) + WHOLE[at:]
        for i, at in enumerate(HEADERS)
    },
    **{
        f"cut {inside} bytes into block {block}": WHOLE[: block * BLOCK + inside]
        for block in range(2 * ROWS + 2)
        for inside in (0, 1, 500)
    },
    "joined": WHOLE + WHOLE,
    "a bit in the padding of the end": flipped(WHOLE, END + 3 * BLOCK),
}


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["tar", "gz"])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_tar_file_is_an_error(tmp_path, what, compress):
    path = tmp_path / ("shard.tar.gz" if compress is gzip.compress else "shard.tar")
    path.write_bytes(compress(DAMAGED[what]))
    with pytest.raises(StageError, match=rf"{path.name} cannot be read as tar: (member \d)?"):
        records(path)


def test_the_error_has_the_number_of_the_member(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(DAMAGED["a bit of header 4"])
    with pytest.raises(StageError, match=r"member 5: its header is damaged \(bad checksum\)"):
        records(path)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("long_name", ["", "a/" * 80])
def test_every_format_is_read_whole(tmp_path, format, long_name):
    path = tmp_path / "shard.tar"
    path.write_bytes(shard(3, long_name, format=format))
    assert records(path) == [{"text": f"row {i}"} for i in range(3)]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_claims_gigabytes_is_refused_unread(tmp_path, kind):
    info = tarfile.TarInfo("pax")
    info.type, info.size = kind, 4 << 30
    path = tmp_path / "shard.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + WHOLE)
    with pytest.raises(StageError, match=r"member 1: a header of 4,294,967,296 bytes"):
        records(path)
