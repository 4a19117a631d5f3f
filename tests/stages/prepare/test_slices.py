"""Slices: where sources are cut, which records are read, and what is done once for all runs."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cache import digest_cache
from penstock.core.cache.noted_files import get_or_write, prunable
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import StageError
from penstock.core.sources.pin import pin_data
from penstock.prepare import workers
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers import file_splits
from penstock.prepare.readers.read_slice import read_records
from penstock.prepare.slices import plan_slices, select_shard
from tests.stages.prepared import contents, prepare, run, said, table_of, texts, write_lines

TEXT = {"type": "text"}
KINDS = ("jsonl", "txt", "json", "csv", "parquet", "arrow", "jsonl.gz")


def write(folder, kind, numbers):
    """A file whose records hold these numbers as text, some longer than a slice is meant to be."""
    path, rows = folder / f"{len(list(folder.iterdir()))}.{kind}", [str(n) * 40 for n in numbers]
    table = pa.table({"text": pa.array(rows, pa.string())})
    lines = [json.dumps({"text": row}) for row in rows]
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n\n".join(lines).encode()))
    else:
        text = {"jsonl": lines, "txt": rows, "csv": ["text", *rows]}.get(kind)
        path.write_text("\n".join(text) if text else json.dumps([{"text": row} for row in rows]))
    return path


def planned(stage):
    return plan_slices(
        stage.settings,
        stage.sources,
        stage.test_sources,
        stage.decontaminate_sources,
        stage.tokenizer,
    )


def numbers_in(items):
    return [
        int(value["text"][: len(value["text"]) // 40])
        for item in items
        for batch in read_records(item)
        for value in batch.values
        if not isinstance(value, BadRecord)
    ]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    slice_bytes=st.sampled_from([1, 60, 300, 1 << 20]),
    shards=st.integers(1, 5),
    parts=st.integers(1, 4),
    runs=st.integers(0, 6),
)
def test_every_record_is_in_exactly_one_piece_however_pieces_are_combined(
    tmp_path_factory, kind, counts, slice_bytes, shards, parts, runs
):
    folder = tmp_path_factory.mktemp("data")
    starts = [sum(counts[:i]) for i in range(len(counts))]
    for start, count in zip(starts, counts, strict=True):
        write(folder, kind, range(start, start + count))
    source = pin_data(str(folder))
    # preprocess_shards takes the place of shards; 0 leaves both out.
    cut = {"preprocess_shards": runs} if runs else {"shards": shards}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_splits, "SLICE_BYTES", slice_bytes)
        for index, part in product(range(1 if runs else shards), range(parts)):
            its = {**TEXT, **cut, "dataset_shard_num": parts, "dataset_shard_idx": part}
            its |= {} if runs else {"shards_idx": index}
            items = planned(replace(prepare(("dummy", its)), sources=(source,)))
            assert not runs or len(items) == runs
            found.append((len(items), numbers_in(items)))
    together = sorted(number for _, piece in found for number in piece)
    assert together == list(range(sum(counts)))
    # Pieces are even to within one record of every slice, for each way they are cut.
    sizes = [len(piece) for _, piece in found]
    assert max(sizes) - min(sizes) <= 2 * max(slices for slices, _ in found)
    assert all(piece == sorted(piece) for _, piece in found)


def test_an_unset_shards_idx_is_the_first_piece_and_another_is_another(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(30))
    found = {}
    for name, its in {
        "unset": {},
        "first": {"shards_idx": 0},
        "second": {"shards_idx": 1},
        "third": {"shards_idx": 2},
    }.items():
        # One cache for all: the slices of one piece must not pass for another's.
        stage = prepare((path, {**TEXT, "shards": 3, **its}), slices=tmp_path / "slices")
        run(stage, tmp_path / name)
        found[name] = said(table_of(tmp_path / name))
    assert found.pop("unset") == found["first"]
    assert [len(piece) for piece in found.values()] == [10, 10, 10]
    assert sorted(chain(*found.values())) == sorted(record["text"] for record in texts(30))


def test_a_data_set_is_prepared_in_as_many_slices_as_wanted_whatever_its_size(tmp_path):
    write(tmp_path, "csv", range(7))
    write(tmp_path, "csv", range(7, 10))
    stage = prepare((tmp_path, {**TEXT, "preprocess_shards": 4}))
    assert [numbers_in([item]) for item in planned(stage)] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_what_is_appended_or_changed_is_all_that_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 400)
    for name in "abc":
        write_lines(tmp_path / "data" / f"{name}.jsonl", texts(60, name))
    stage = prepare((tmp_path / "data", TEXT))

    def keys():
        now = replace(stage, sources=(pin_data(str(tmp_path / "data")),))
        return [(item.pieces[0].name, item.key) for item in planned(now)]

    before = keys()
    assert len(before) > 12
    with (tmp_path / "data" / "b.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    appended = keys()
    # The last range has grown, or a range was added; nothing else is new.
    assert {name for name, _ in set(appended) - set(before)} == {"b.jsonl"}
    assert len(set(appended) - set(before)) == 1
    write_lines(tmp_path / "data" / "a.jsonl", [{"text": "a new first line"}, *texts(60, "a")])
    changed = keys()
    assert {name for name, _ in set(changed) - set(appended)} == {"a.jsonl"}


def test_a_fault_is_told_with_its_line_in_the_file_whichever_slice_it_is_in(tmp_path, monkeypatch):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 300)
    lines = [json.dumps(record) for record in texts(100)]
    lines[3], lines[50], lines[98] = "", "{", '{"txet": 1}'
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(StageError) as caught:
        run(prepare((path, TEXT)), tmp_path / "out")
    assert "a.jsonl:51: not JSON" in str(caught.value)
    assert "a.jsonl:99: no column 'text'" in str(caught.value)
    table = pa.Table.from_pylist([{"text": str(n) if n != 7 else None} for n in range(10)])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(StageError, match=r"a\.parquet, record 8: text is null"):
        run(prepare((tmp_path / "a.parquet", TEXT)), tmp_path / "out")


class Counted:
    """Counts how often each slice is tokenized."""

    def __init__(self, monkeypatch):
        self.times = Counter()
        self._tokenize = workers.tokenize
        monkeypatch.setattr(workers, "tokenize", self)

    def __call__(self, item, *rest):
        self.times[item.content] += 1
        return self._tokenize(item, *rest)


@pytest.mark.slow
def test_runs_that_differ_only_downstream_share_their_slices(tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    paths = [write_lines(tmp_path / f"{name}.jsonl", texts(40, name)) for name in "ab"]
    stage = prepare(*((path, TEXT) for path in paths), slices=tmp_path / "slices")
    run(stage, tmp_path / "first")
    assert sum(counted.times.values()) == 2
    for name, changed in {
        "seed": {"seed": 7},
        "validation": {"val_set_size": 9},
        "unshuffled": {"shuffle_merged_datasets": False},
        "deduplicated": {"deduplicate": "exact"},
        "files": {"num_dataset_shards_to_save": 3},
    }.items():
        other = replace(stage, settings=stage.settings.model_copy(update=changed))
        run(other, tmp_path / name)
        run(replace(other, slices_path=None), tmp_path / "alone" / name)
        assert contents(tmp_path / name) == contents(tmp_path / "alone" / name)
        counted.times.subtract(dict.fromkeys(counted.times, 1))  # made for the one alone
    assert sum(counted.times.values()) == 2


def test_a_cached_slice_that_is_not_what_was_made_is_made_again(tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    path = write_lines(tmp_path / "a.jsonl", texts(40))
    stage = prepare((path, TEXT), slices=tmp_path / "slices")
    run(stage, tmp_path / "first")
    [cached] = (tmp_path / "slices").glob("*.arrow")
    good, made = contents(tmp_path / "first"), 1

    def damage(act):
        nonlocal made
        act()
        made += 1
        run(stage, tmp_path / f"again-{made}")
        assert contents(tmp_path / f"again-{made}") == good
        assert sum(counted.times.values()) == made

    whole = cached.read_bytes()
    damage(lambda: replaced(cached, whole[:-1]))
    damage(lambda: replaced(cached, whole[:-1] + b"?"))
    damage(lambda: replaced(cached.with_suffix(".json"), b'{"format": 1, "fi'))
    damage(cached.unlink)
    # A copy with another time is read, and found to be the same.
    os.utime(cached, (1, 1))
    run(stage, tmp_path / "touched")
    assert sum(counted.times.values()) == made


def replaced(path, content):
    path.unlink()
    path.write_bytes(content)


def test_shares_are_disjoint_even_and_all_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 300)
    counted = Counted(monkeypatch)
    write_lines(tmp_path / "a.jsonl", texts(200))
    stage = prepare((tmp_path / "a.jsonl", TEXT), slices=tmp_path / "slices")
    items = planned(stage)
    shares = [select_shard(items, index, 3) for index in range(3)]
    assert sorted(i.key for share in shares for i in share) == sorted(i.key for i in items)
    sizes = [sum(item.num_bytes for item in share) for share in shares]
    assert max(sizes) - min(sizes) <= 600
    out = tmp_path / "out"
    done = [stage.prepare_share(out, index, 3) for index in (2, 0, 1)]
    assert [share.done for share in done] == [share.slices for share in done]
    assert sum(share.done for share in done) == len(items)
    assert stage.prepare_share(out, 1, 3).done == 0
    assert not out.exists()
    run(stage, out)
    assert set(counted.times.values()) == {1}
    assert said(table_of(out)) == [record["text"] for record in texts(200)]


def test_two_runs_at_once_make_each_slice_once(tmp_path, monkeypatch):
    counted, started = Counted(monkeypatch), Barrier(2)
    for name in "abcdef":
        write_lines(tmp_path / "data" / f"{name}.jsonl", texts(200, name))
    stage = prepare((tmp_path / "data", TEXT), slices=tmp_path / "slices")

    def at_once(name):
        started.wait()
        run(stage, tmp_path / name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(at_once, ("one", "two")))
    assert dict(counted.times) == {item.content: 1 for item in planned(stage)}
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not list((tmp_path / "slices").glob(".*"))


DIES = """
import os, sys
from pathlib import Path
from filelock import FileLock
folder, key = Path(sys.argv[1]), sys.argv[2]
folder.mkdir()
lock = FileLock(folder / f".{key}.lock")
lock.acquire()
(folder / f"{key}.arrow.elsewhere-1-2.part").write_bytes(b"half")
os.utime(folder / f"{key}.arrow.elsewhere-1-2.part", (1, 1))
print("held", flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_a_slice_whose_maker_was_killed_is_waited_for_and_made(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(4))
    stage = prepare((path, TEXT), slices=tmp_path / "slices")
    [item] = planned(stage)
    arguments = [sys.executable, "-c", DIES, str(tmp_path / "slices"), item.key]
    with (
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker,
        ThreadPoolExecutor(1) as pool,
    ):
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"held\n"
        waiting = pool.submit(run, stage, tmp_path / "out")
        time.sleep(0.2)
        assert not waiting.done()
        maker.kill()
        waiting.result(timeout=60)
    names = {p.name for p in (tmp_path / "slices").iterdir() if p.suffix != ".npy"}
    assert names == {f"{item.key}.arrow", f"{item.key}.json"}


def test_sealed_results_are_links_to_the_slices_and_not_read_again(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", texts(50))
    stage = prepare((tmp_path / "a.jsonl", TEXT), shuffle_merged_datasets=False)
    get_or_build(PlannedStage(stage, tmp_path / "root" / "prepare" / "one"))
    [cached] = (tmp_path / "root" / "slices").glob("*.arrow")
    read = []
    digest = "penstock.core.cache.digest_cache.sha256_file"
    real = sys.modules["penstock.core.cache.digest_cache"].sha256_file
    monkeypatch.setattr(digest, lambda path: read.append(path.name) or real(path))
    other = replace(stage, settings=stage.settings.model_copy(update={"seed": 7}))
    outcome = get_or_build(PlannedStage(other, tmp_path / "root" / "prepare" / "two"))
    [linked] = outcome.path.rglob("*.arrow")
    assert linked.samefile(cached)
    assert set(read) <= {"plan.json", "a.jsonl"}  # which may be too young to be remembered


def test_a_sealed_result_is_linked_to_where_it_holds_the_very_same_samples_alone(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(60))
    stage = prepare((tmp_path / "a.jsonl", TEXT), val_set_size=20)
    found = {}
    for name, changed in {
        "one": {},
        "reseeded": {"seed": 7},  # as many samples in either split, and others
        "reordered": {"shuffle_merged_datasets": False},
    }.items():
        its = replace(stage, settings=stage.settings.model_copy(update=changed))
        found[name] = get_or_build(PlannedStage(its, tmp_path / "root" / "prepare" / name)).path
        run(its, tmp_path / name / "alone")  # with nothing beside it to link to
        for split, count in (("train", 40), ("validation", 20)):
            stored, alone = (
                said(table_of(folder, split)) for folder in (found[name], tmp_path / name / "alone")
            )
            assert stored == alone
            assert len(set(stored)) == count
    files = {name: sorted((path / "data").rglob("*.arrow")) for name, path in found.items()}
    assert all(map(os.path.samefile, files["one"], files["reordered"]))
    assert not any(map(os.path.samefile, files["one"], files["reseeded"]))


def test_slices_that_nothing_uses_can_be_pruned_after_a_day(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(5))
    cache = tmp_path / "root" / "slices"
    step = PlannedStage(prepare((tmp_path / "a.jsonl", TEXT)), tmp_path / "root" / "prepare" / "x")
    get_or_build(step)
    names = [f"{'0' * 16}{end}" for end in (".arrow", ".json", ".near.npy")]
    loose = [write_lines(cache / name, []) for name in names]
    assert list(prunable(cache, frozenset())) == []  # all are new
    for file in cache.iterdir():
        os.utime(file, (1, 1))
    assert list(prunable(cache, frozenset())) == [sorted(loose)]
    for files in prunable(cache, frozenset()):
        # Until they are deleted, no run can begin to use them.
        assert get_or_write(files[0], lambda _: {}, "skip") == "busy"
    assert list(prunable(cache, frozenset({"0" * 16}))) == []


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", texts(5))
    stage = prepare((path, TEXT), slices=tmp_path / "slices")
    tokenize = workers.tokenize

    def meddle(*arguments):
        write_lines(path, texts(6))
        return tokenize(*arguments)

    monkeypatch.setattr(workers, "tokenize", meddle)
    with pytest.raises(StageError, match=r"a\.jsonl has changed since this run started"):
        run(stage, tmp_path / "out")
    assert not list((tmp_path / "slices").glob("*.json"))


def test_a_source_of_weight_zero_is_not_tokenized(tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    paths = [write_lines(tmp_path / f"{name}.jsonl", texts(9, name)) for name in "ab"]
    mix = ({"weight": 0.0}, {"weight": 1.0})
    run(prepare(*((path, TEXT) for path in paths), mix=mix), tmp_path / "out")
    assert sum(counted.times.values()) == 1
    assert said(table_of(tmp_path / "out")) == [record["text"] for record in texts(9, "b")]


def test_where_no_digest_is_remembered_a_slice_reads_its_own_lines_again_and_not_the_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 300)
    monkeypatch.setattr(digest_cache, "file_system_type", lambda _: "fuse.s3fs")
    path = write_lines(tmp_path / "a.jsonl", texts(60))
    reads, real = [], digest_cache.sha256_file
    monkeypatch.setattr(digest_cache, "sha256_file", lambda path: reads.append(path) or real(path))
    stage = prepare((path, TEXT), slices=tmp_path / "slices")
    assert len(planned(stage)) > 4
    run(stage, tmp_path / "out")
    assert reads.count(path) <= 2
    monkeypatch.setattr(workers, "tokenize", changing(path, workers.tokenize))
    with pytest.raises(StageError, match=r"a\.jsonl has changed since this run started"):
        run(replace(stage, slices_path=tmp_path / "others"), tmp_path / "other")


def changing(path, tokenize):
    """`tokenize`, while another program writes to the last line of the file."""

    def tokenized(*arguments):
        done = tokenize(*arguments)
        path.write_bytes(path.read_bytes()[:-4] + b'x"}\n')
        return done

    return tokenized
