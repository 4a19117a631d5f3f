import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import StageError
from penstock.core.stage import Artifact, key_of
from penstock.pack import shards
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from tests.stages.prepared import GSM8K, contents, prepare, run, table_of, write_lines


def samples(lengths):
    """Tokenized records; every one but the first token of each third sample's is trained."""
    rng = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        ids = rng.integers(0, 256, length).tolist()
        masked = length // 2 if number % 3 == 0 else 0
        found.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return found


def packed(prepared, out, **its):
    out.mkdir(parents=True, exist_ok=True)
    return Pack(PackSettings(**its), prepared).run(out)


def documents(folder, split="train"):
    """(input_ids, labels) of every document in stored order, read with nothing but pyarrow."""
    found, per_row = [], []
    for file in sorted((folder / "data" / split).glob("*.arrow")):
        for row in pa.ipc.open_file(file).read_all().to_pylist():
            assert len(row["input_ids"]) == len(row["labels"]) == sum(row["lengths"])
            ends = np.cumsum(row["lengths"]).tolist()
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                found.append((tuple(row["input_ids"][start:end]), tuple(row["labels"][start:end])))
            per_row.append(len(row["lengths"]))
    return found, per_row


def shifted(table):
    """What the documents of a prepared split must look like when packed."""
    pairs = zip(table["input_ids"].to_pylist(), table["labels"].to_pylist(), strict=True)
    return [(tuple(ids), (*labels[1:], -100)) for ids, labels in pairs]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(2, 60), min_size=2, max_size=60),
    st.sampled_from(["sequential", "multipack"]),
    st.sampled_from([None, 1, 3]),
)
def test_every_document_is_in_one_row_whole_and_shifted_once(
    tmp_path_factory, lengths, method, num_shards
):
    here = tmp_path_factory.mktemp("pack")
    path = write_lines(here / "a.jsonl", samples(lengths))
    artifact, _ = run(prepare((path, {})), here / "p" / "x")
    its = {"sample_packing_method": method, "sample_packing_sequence_len": 64}
    facts = packed(artifact, here / "out", num_shards=num_shards, **its)
    found, _ = documents(here / "out")
    assert sorted(found) == sorted(shifted(table_of(artifact.path)))
    rows = PackedRows(here / "out" / "data" / "train")
    assert rows.lengths().max() <= 64
    assert facts["tokens"]["train"] == sum(lengths)
    assert facts["documents"]["train"] == len(lengths)
    assert facts["trained_tokens"]["train"] == sum(label != -100 for _, ls in found for label in ls)
    assert facts["fill"]["train"] == pytest.approx(sum(lengths) / (64 * len(rows)), abs=1e-6)


@pytest.fixture
def gsm8k(shared, tmp_path_factory):
    here = tmp_path_factory.mktemp("gsm8k")
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:1500]
    path = write_lines(here / "train.jsonl", lines)
    return run(prepare((path, GSM8K), val_set_size=50), here / "p" / "x")


def test_real_rows_keep_their_counts_from_stage_to_stage(gsm8k, tmp_path):
    prepared, before = gsm8k
    sequential = packed(prepared, tmp_path / "s", sample_packing_sequence_len=4096)
    multipack = packed(
        prepared,
        tmp_path / "m",
        sample_packing_sequence_len=4096,
        sample_packing_method="multipack",
    )
    for facts in (sequential, multipack):
        assert facts["documents"] == before["rows"]
        assert facts["tokens"] == before["tokens"]
        assert facts["trained_tokens"] == before["trained_tokens"]
        assert facts["lengths"] == before["lengths"]
    assert multipack["fill"]["train"] > 0.98 > sequential["fill"]["train"]


def test_sequential_rows_follow_the_planned_order(gsm8k, tmp_path):
    prepared, _ = gsm8k
    packed(prepared, tmp_path, sample_packing_sequence_len=4096)
    planned = PreparedSamples(prepared.path, "train")
    expected = shifted(table_of(prepared.path))
    found, _ = documents(tmp_path)
    assert found == [expected[index] for index in planned.order().tolist()]
    assert planned.order().tolist() != list(range(len(planned)))


def test_rows_packed_tightly_are_not_left_sorted_by_length(gsm8k, tmp_path):
    prepared, _ = gsm8k
    its = {"sample_packing_method": "multipack", "sample_packing_sequence_len": 4096}
    packed(prepared, tmp_path / "1", seed=1, **its)
    packed(prepared, tmp_path / "2", seed=2, **its)
    one, two = (PackedRows(tmp_path / n / "data" / "train").lengths() for n in "12")
    assert (np.diff(one) > 0).any()
    assert sorted(one) == sorted(two)
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_rerun_after_a_crash_keeps_finished_shards(gsm8k, tmp_path, method):
    prepared, _ = gsm8k
    its = {"sample_packing_sequence_len": 4096, "num_shards": 3, "sample_packing_method": method}
    facts = packed(prepared, tmp_path / "whole", **its)
    packed(prepared, tmp_path / "broken", **its)
    folder = tmp_path / "broken" / "data" / "train"
    kept = folder / "rows-00001-of-00003.arrow"
    (folder / "rows-00000-of-00003.arrow").unlink()
    (folder / "rows-00002-of-00003.arrow").rename(folder / "rows-00002-of-00003.arrow.part")
    written = kept.stat().st_mtime_ns
    assert packed(prepared, tmp_path / "broken", **its) == facts
    assert kept.stat().st_mtime_ns == written
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_how_rows_are_batched_in_memory_changes_no_row(gsm8k, tmp_path, monkeypatch):
    prepared, _ = gsm8k
    packed(prepared, tmp_path / "a", sample_packing_sequence_len=4096)
    monkeypatch.setattr(shards, "BATCH_TOKENS", 10_000)
    packed(prepared, tmp_path / "b", sample_packing_sequence_len=4096)
    assert documents(tmp_path / "a") == documents(tmp_path / "b")


def test_validation_is_packed_unless_it_is_not_to_be(gsm8k, tmp_path):
    prepared, _ = gsm8k
    packed(prepared, tmp_path / "a", sample_packing_sequence_len=4096, eval_sample_packing=False)
    packed(prepared, tmp_path / "b", sample_packing_sequence_len=4096, eval_sample_packing=None)
    alone, per_row = documents(tmp_path / "a", "validation")
    assert per_row == [1] * 50
    together, per_row = documents(tmp_path / "b", "validation")
    assert len(per_row) < 50
    assert alone == together == shifted(table_of(prepared.path, "validation"))


def test_samples_longer_than_a_row_are_named_with_what_to_write(tmp_path):
    paths = [
        write_lines(tmp_path / f"{n}.jsonl", samples(lengths))
        for n, lengths in (("a", [5, 6]), ("b", [30, 5, 40]))
    ]
    artifact, _ = run(prepare(*((path, {}) for path in paths)), tmp_path / "p" / "x")
    with pytest.raises(StageError) as caught:
        packed(artifact, tmp_path / "out", sample_packing_sequence_len=20)
    message = str(caught.value)
    assert "2 of 5 train samples are longer than a row of 20 tokens; the longest has 40" in message
    assert "data.datasets.1.max_seq_len to 20" in message
    assert "data.sample_packing_sequence_len to 40" in message


def test_the_key_follows_the_prepared_samples_and_every_setting(tmp_path):
    stage = Pack(PackSettings(), Artifact("prepare", "a" * 64, tmp_path))
    changes = {
        "sample_packing_method": "multipack",
        "sample_packing_sequence_len": 100,
        "sample_packing_group_size": 10,
        "eval_sample_packing": False,
        "num_shards": 2,
        "seed": 7,
    }
    stages = [
        stage,
        replace(stage, prepared=Artifact("prepare", "b" * 64, tmp_path)),
        *(replace(stage, settings=PackSettings(**{k: v})) for k, v in changes.items()),
    ]
    assert set(changes) == set(PackSettings.model_fields)
    assert len({key_of(one) for one in stages}) == len(stages)
    assert key_of(replace(stage, prepared=Artifact("prepare", "a" * 64, tmp_path / "moved"))) == (
        key_of(stage)
    )
    assert key_of(stage)[:16] == "65b49ccaf1d94fa8"
    assert json.loads(stage.settings.model_dump_json())["eval_sample_packing"] is True
