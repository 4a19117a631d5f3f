"""Damaged files are read whole or refused by name, without a crash, whatever bytes they have."""

import bz2
import gzip
import io
import itertools
import lzma
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stages.tars import tar_of

ROWS = 40
FILES_PER_KIND = 50
TEXTS = [{"text": f"row {i} " * 9} for i in range(ROWS)]
READ = """if True:
    import sys
    from pathlib import Path
    from penstock.core.errors import StageError
    from penstock.prepare.readers import archive, columnar
    from penstock.prepare.readers.decompress import SourceFile
    for name in sys.argv[1:]:
        path = Path(name)
        file = SourceFile(path.name, path, max_record_bytes=1 << 20)
        kind = path.name.split(".")[1]
        try:
            if kind == "tar":
                chunks = archive.tar_records(file)
            elif kind == "parquet":
                chunks = columnar.parquet(file, None)
            else:
                chunks = columnar.arrow_file(file, None)
            print(path.name, "read", sum(len(chunk.values()) for chunk in chunks), flush=True)
        except StageError as error:
            print(path.name, "refused" if path.name in str(error) else "unnamed", flush=True)
        except BaseException as error:
            print(path.name, "raised", repr(error)[:200].replace(chr(10), " "), flush=True)
"""


def arrow():
    out = io.BytesIO()
    table = pa.Table.from_pylist(TEXTS)
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return out.getvalue()


def parquet(row_group_size=10):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(TEXTS), out, row_group_size=row_group_size)
    return out.getvalue()


KINDS = {
    "tar": lambda: tar_of(TEXTS),
    "tar.gz": lambda: gzip.compress(tar_of(TEXTS)),
    "tar.bz2": lambda: bz2.compress(tar_of(TEXTS)),
    "tar.xz": lambda: lzma.compress(tar_of(TEXTS)),
    "arrow": arrow,
    "parquet": parquet,
}


def damaged(content, draw):
    at = draw.randrange(len(content))
    match draw.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
        case 2:
            return content[:at] + bytes(512) + content[at + 512 :]
        case _:
            return content[:at] + draw.randbytes(8) + content[at + 8 :]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_by_name_or_has_all_its_records(tmp_path, kind):
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    content = KINDS[kind]()
    paths = [tmp_path / f"{number}.{kind}" for number in range(FILES_PER_KIND)]
    for path in paths:
        path.write_bytes(damaged(content, draw))
    assert_whole_or_refused(paths, seed)


@pytest.mark.slow
def test_no_bit_of_a_parquet_footer_ends_the_process(tmp_path):
    content = parquet(row_group_size=ROWS)
    footer = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    paths = []
    for at, bit in itertools.product(range(footer, len(content)), range(8)):
        paths.append(tmp_path / f"{at}-{bit}.parquet")
        paths[-1].write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    assert_whole_or_refused(paths)


def assert_whole_or_refused(paths, seed=None):
    words = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    print(
        f"seed {seed}:", {what: sum(w == what for _, w in lines) for what in {w for _, w in lines}}
    )
    assert (done.returncode, len(lines)) == (0, len(paths)), (seed, done.stderr[-500:])
    assert {what for _, what in lines} <= {"refused", f"read {ROWS}"}, (seed, lines)
