import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pytest

from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source, stage_key
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import StageError
from penstock.core.sources.pin import BUILTIN_DATA
from penstock.prepare import workers
from penstock.prepare.builtin import GENERATORS
from penstock.prepare.readers import file_splits
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepared import GSM8K, contents, prepare, run, said, table_of, texts, write_lines
from tests.turns import one_day_in

TEXT = {"type": "text"}


def test_gsm8k_goes_through_whole_and_the_trained_tokens_are_the_answers(shared, tmp_path):
    path = shared / "data" / "gsm8k" / "train.jsonl"
    _, facts = run(prepare((path, GSM8K)), tmp_path)
    assert facts["rows"] == {"train": 7473, "validation": 0}
    assert facts["dropped"] == {}
    tokenizer = byte_tokenizer()
    table = table_of(tmp_path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for index in (*range(100), 7472):
        ids = table["input_ids"][index].as_py()
        labels = table["labels"][index].as_py()
        trained = [token for token in labels if token != -100]
        assert tokenizer.decode(trained) == records[index]["answer"] + "<|im_end|>"
        assert records[index]["question"] in tokenizer.decode(ids)
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_plain_pyarrow_and_datasets_read_the_files(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(30))
    run(prepare((path, TEXT), val_set_size=5), tmp_path / "out")
    files = {s: str(tmp_path / "out" / "data" / s / "*.arrow") for s in ("train", "validation")}
    loaded = datasets.load_dataset("arrow", data_files=files, cache_dir=str(tmp_path / "cache"))
    assert {split: len(loaded[split]) for split in loaded} == {"train": 25, "validation": 5}
    assert loaded["train"][0]["source"] == "a.jsonl"
    table = table_of(tmp_path / "out")
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    assert table["input_ids"].to_pylist() == loaded["train"]["input_ids"][:]


def test_validation_and_training_are_all_samples_and_share_none(tmp_path):
    paths = [write_lines(tmp_path / f"{w}.jsonl", texts(n, w)) for w, n in (("a", 40), ("b", 23))]
    stage = prepare(*((path, TEXT) for path in paths), val_set_size=0.2)
    _, facts = run(stage, tmp_path / "out")
    train, held = said(table_of(tmp_path / "out")), said(table_of(tmp_path / "out", "validation"))
    assert facts["rows"] == {"train": 50, "validation": 13}
    assert sorted(train + held) == sorted(r["text"] for r in texts(40, "a") + texts(23, "b"))
    other = replace(stage, settings=stage.settings.model_copy(update={"seed": 7}))
    run(other, tmp_path / "other")
    assert said(table_of(tmp_path / "other", "validation")) != held


def test_test_datasets_are_validation_whole(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", texts(10))
    test = write_lines(tmp_path / "b.jsonl", texts(4, "v"))
    run(prepare((train, TEXT), test=[(test, TEXT)]), tmp_path / "out")
    assert said(table_of(tmp_path / "out", "validation")) == [r["text"] for r in texts(4, "v")]
    assert len(table_of(tmp_path / "out")) == 10


def test_rerun_after_a_crash_keeps_finished_slices_and_ends_with_the_same_bytes(tmp_path):
    paths = [write_lines(tmp_path / f"{name}.jsonl", texts(40, name)) for name in "abc"]
    stage = prepare(*((path, TEXT) for path in paths), val_set_size=10)
    run(stage, tmp_path / "whole" / "x")
    out = tmp_path / "broken" / "x"
    away = paths[2].rename(tmp_path / "away")
    with pytest.raises(OSError, match=r"c\.jsonl"):
        run(stage, out)
    kept = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*.arrow")}
    assert len(kept) == 2
    assert not contents(out)
    away.rename(paths[2])
    _, facts = run(stage, out)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert contents(out) == contents(tmp_path / "whole" / "x")
    assert set(contents(out)) == {"plan.json"} | {
        f"data/{entry}"
        for entry in (p.relative_to(out / "data").as_posix() for p in out.rglob("*.arrow"))
    }
    assert stage.run(out) == facts  # also after the last file, before the seal


def test_a_hub_data_set_is_read_at_its_commit_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repo = write_lines(tmp_path / "repo" / "train.jsonl", texts(2100)).parent
    pin = {"kind": "hub", "repo": str(repo), "commit": "0" * 40, "split": "train"}
    source = Source({**pin, "name": None, "data_files": None})
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 1)  # as few rows in a slice as may be
    for how in ({}, {"streaming": True}):
        stage = replace(prepare(("dummy", {**TEXT, **how})), sources=(source,))
        run(stage, tmp_path / str(how))
        plan = json.loads((tmp_path / str(how) / "plan.json").read_text())
        assert len(plan["slices"]) == (1 if how else 3)
        assert said(table_of(tmp_path / str(how))) == [record["text"] for record in texts(2100)]
    absent = Source({**source.pin, "split": "test"})
    with pytest.raises(StageError, match=r"cannot be loaded.*test"):
        run(replace(stage, sources=(absent,)), tmp_path / "other")


def test_the_store_runs_seals_and_reuses_it(tmp_path):
    stage = prepare((write_lines(tmp_path / "a.jsonl", texts(5)), TEXT))
    step = PlannedStage(stage, tmp_path / "store" / stage_key(stage)[:16])
    first, second = get_or_build(step), get_or_build(step)
    assert (first.status, second.status) == ("ran", "cached")
    assert first.facts == second.facts
    assert str(tmp_path) not in (step.path / MANIFEST).read_text()


@one_day_in(2, of=0)
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES_PER_PROCESS", 1)
    paths = [write_lines(tmp_path / f"{name}.jsonl", texts(20, name)) for name in "ab"]
    for num_proc in (1, 2):
        stage = prepare(*((path, TEXT) for path in paths), num_proc=num_proc)
        run(stage, tmp_path / str(num_proc) / "x")
    assert contents(tmp_path / "1" / "x") == contents(tmp_path / "2" / "x")
    for path in paths:
        path.unlink()
    with pytest.raises(OSError, match=r"a\.jsonl"):  # the first in the order of the sources
        run(stage, tmp_path / "bad" / "x")


@pytest.mark.parametrize(("wanted", "files"), [(1, 1), (3, 3), (50, 35)])
def test_as_many_files_as_wanted_hold_all_samples_in_order(tmp_path, wanted, files):
    for name, count in (("a", 10), ("b", 25)):
        write_lines(tmp_path / "data" / f"{name}.jsonl", texts(count, name))
    stage = prepare((tmp_path / "data", TEXT), num_dataset_shards_to_save=wanted)
    run(stage, tmp_path / "out")
    assert len(list((tmp_path / "out" / "data" / "train").glob("*.arrow"))) == files
    assert said(table_of(tmp_path / "out")) == [r["text"] for r in texts(10, "a") + texts(25, "b")]


def test_a_data_set_listed_twice_weighs_twice(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(5))
    _, facts = run(prepare((path, TEXT), (path, TEXT)), tmp_path / "out")
    assert facts["rows"]["train"] == 10


def test_validation_that_takes_everything_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(5))
    with pytest.raises(
        StageError, match=r"takes 5 samples, and there are only 5.*\n.*val_set_size"
    ):
        run(prepare((path, TEXT), val_set_size=5), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic", "dummy"])
def test_built_in_data_goes_through_whole_and_changing_it_raises_its_version(tmp_path, name):
    path = next(path for path in BUILTIN_DATA if path.endswith(name))
    its = {"type": "chat" if name == "arithmetic" else "tokenized"}
    _, facts = run(prepare((path, its)), tmp_path)
    records = list(GENERATORS[name]())
    assert facts["rows"]["train"] == len(records)
    assert (BUILTIN_DATA[path], digest_json(records)[:16]) == GOLDEN[name]


GOLDEN = {"arithmetic": (1, "e4324e1456e22d25"), "dummy": (1, "3133f93d4835da2b")}


def test_the_built_in_arithmetic_is_right_and_asks_nothing_twice():
    problems = set()
    for record in GENERATORS["arithmetic"]():
        problem, steps, result = record["messages"][1]["content"].split(" = ")
        a, sign, b = problem.split()
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        tens, sign_again, ones = steps.split()
        assert sign == sign_again
        assert int(result) == (int(tens) + int(ones) if sign == "+" else int(tens) - int(ones))
        assert {a, b} <= set(
            record["messages"][0]["content"].strip("?.=").replace("?", "").replace(".", "").split()
        )
        problems.add(problem)
    assert len(problems) == 8100 + 3240


def test_the_key_of_a_reference_run_does_not_move(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", texts(3))
    assert stage_key(prepare((path, TEXT), val_set_size=1))[:16] == "85d7a0cbe7dcfab9"


def test_a_file_that_an_attempt_with_other_slices_left_is_no_part_of_the_result(tmp_path):
    path, left = (
        write_lines(tmp_path / "a.jsonl", texts(3)),
        tmp_path / "out/data/train/slice.arrow",
    )
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of other records")
    run(prepare((path, {"type": "text"})), tmp_path / "out")
    assert not left.exists()
    assert table_of(tmp_path / "out").num_rows == 3
