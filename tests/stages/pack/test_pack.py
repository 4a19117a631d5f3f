import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.loading.load import loads
from penstock.core import env
from penstock.core.cache.stage import Artifact, stage_key
from penstock.core.errors import StageError
from penstock.core.files import write_json
from penstock.pack import shards, spread
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.pipeline.plan import plan
from penstock.rows.bin_plan import greedy
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from penstock.rows.schema import PREPARED
from penstock.rows.sources import Sources
from tests.config.values import smallest
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


def packed(prepared, out, *, num_proc=1, start_method: Any = "spawn", **its: Any):
    out.mkdir(parents=True, exist_ok=True)
    return Pack(PackSettings(**its), prepared, num_proc, start_method).run(out)


def stored(folder, pairs, files=1):
    """A prepared artifact of exactly these (input_ids, labels)."""
    entries = []
    for number, some in enumerate(np.array_split(np.arange(len(pairs)), files)):
        ids, labels = ([pairs[i][side] for i in some] for side in (0, 1))
        columns = [ids, labels, pa.array(["a"] * len(ids)).dictionary_encode(), range(len(ids))]
        file = f"data/train/slice-{number}.arrow"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        table = pa.table(dict(zip(PREPARED.names, columns, strict=True)), schema=PREPARED)
        with pa.ipc.new_file(folder / file, PREPARED) as writer:
            writer.write_table(table, max_chunksize=7)
        part = {"dataset": 0, "rows": len(ids), "slice": "0" * 16}
        entries.append({"file": file, "parts": [part]})
    mix = {"seed": 1, "weights": [1.0]}
    splits = {"train": entries, "validation": []}
    write_json(folder / "plan.json", {"kind": "sft", "mix": mix, "splits": splits})
    return Artifact("prepare", "0" * 64, folder)


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


@st.composite
def masked(draw):
    """A sample whose mask is hard to get right: tokens that repeat, one trained token, or none."""
    length = draw(st.one_of(st.just(1), st.integers(1, 60)))
    ids = draw(st.one_of(st.just([7] * length), st.lists(st.integers(0, 3), min_size=length)))
    ids = ids[:length]
    mask = draw(st.sampled_from([[], [0], [length - 1], range(length), range(length // 2, length)]))
    return ids, [token if at in mask else -100 for at, token in enumerate(ids)]


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(masked(), min_size=1, max_size=50),
    st.sampled_from(["sequential", "multipack"]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([5, 100_000]),
    st.sampled_from([1, 3]),
)
def test_every_document_is_in_one_row_whole_and_shifted_once(
    tmp_path_factory, pairs, method, num_shards, group_size, files
):
    here = tmp_path_factory.mktemp("pack")
    artifact = stored(here / "prepared", pairs, files)
    facts = packed(
        artifact,
        here / "out",
        num_shards=num_shards,
        sample_packing_method=method,
        sample_packing_group_size=group_size,
        sample_packing_sequence_len=64,
    )
    found, per_row = documents(here / "out")
    assert sorted(found) == sorted((tuple(ids), (*labels[1:], -100)) for ids, labels in pairs)
    rows = PackedRows(here / "out" / "data" / "train")
    tokens = sum(len(ids) for ids, _ in pairs)
    assert rows.lengths().max() <= 64
    assert facts["epoch_rows"] == {"train": [len(per_row)], "validation": [0]}
    assert facts["shards"]["train"] == min(num_shards or 1, len(per_row))
    assert facts["tokens"]["train"] == tokens
    assert facts["documents"]["train"] == len(pairs)
    assert facts["trained_tokens"]["train"] == sum(label != -100 for _, ls in found for label in ls)
    assert facts["max_token_id"]["train"] == max(max(ids) for ids, _ in pairs)
    assert facts["fill"]["train"] == pytest.approx(tokens / (64 * len(rows)), abs=1e-6)


def plainly_greedy(lengths, capacity, group):
    """Worst fit as one would write it down: each sample to the row with the most room."""
    rows = []
    for start in range(0, len(lengths), group):
        opened = []
        for sample in range(start, min(start + group, len(lengths))):
            rooms = [capacity - sum(lengths[i] for i in row) for row in opened]
            most = max(range(len(opened)), key=lambda row: (rooms[row], -row), default=None)
            if most is None or rooms[most] < lengths[sample]:
                opened.append([sample])
            else:
                opened[most].append(sample)
        rows += opened
    return rows


@settings(max_examples=100)
@given(st.lists(st.integers(1, 64), max_size=80), st.sampled_from([1, 7, 500]))
def test_greedy_rows_are_those_of_worst_fit_group_by_group(lengths, group):
    assert greedy(lengths, 64, group).tolist() == plainly_greedy(lengths, 64, group)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(masked(), min_size=1, max_size=30),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([1, 3]),
)
def test_wrapped_rows_are_one_stream_cut_where_a_row_is_full(
    tmp_path_factory, pairs, num_shards, capacity, files
):
    here = tmp_path_factory.mktemp("wrapped")
    artifact = stored(here / "prepared", pairs, files)
    its = {"sample_packing_method": "wrapped", "sample_packing_sequence_len": capacity}
    facts = packed(artifact, here / "out", num_shards=num_shards, **its)
    found, _ = documents(here / "out")
    rows = PackedRows(here / "out" / "data" / "train")
    tokens = sum(len(ids) for ids, _ in pairs)
    assert rows.lengths().tolist()[:-1] == [capacity] * (len(rows) - 1)
    assert rows.lengths().sum() == tokens
    # What is cut is whole again when its pieces are put together, targets over the cut included.
    wholes = sorted((tuple(ids), (*labels[1:], -100)) for ids, labels in pairs)
    order = PreparedSamples(artifact.path, "train").epochs()[0].tolist()
    stream = [whole_of(artifact, sample) for sample in order]
    assert sorted(stream) == wholes
    for part in (0, 1):
        laid = [token for piece in found for token in piece[part]]
        assert laid == [token for sample in stream for token in sample[part]]
    assert facts["trained_tokens"]["train"] == sum(
        label != -100 for _, labels in wholes for label in labels
    )
    assert facts["documents"]["train"] == len(found)


def whole_of(artifact, sample):
    ids, labels = PreparedSamples(artifact.path, "train").tokens("", sample)
    return tuple(ids.tolist()), (*labels[1:].tolist(), -100)


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
    [order] = planned.epochs()
    assert found == [expected[index] for index in order.tolist()]
    assert order.tolist() != list(range(len(planned)))
    # Another reader of Arrow files sees the same.
    file = str(tmp_path / "data/train/rows-00000-of-00001.arrow")
    cache = str(tmp_path / "cache")
    table = datasets.load_dataset("arrow", data_files=file, split="train", cache_dir=cache)
    assert [n for lengths in table["lengths"] for n in lengths] == [len(ids) for ids, _ in found]


@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_every_epoch_that_is_drawn_has_rows_of_its_own(tmp_path, method):
    path = write_lines(tmp_path / "a.jsonl", samples(range(3, 53)))
    mix = {"mix_strategy": "random", "samples_per_epoch": 40, "epochs": 3}
    artifact, _ = run(prepare((path, {}), **mix), tmp_path / "p" / "x")
    facts = packed(
        artifact,
        tmp_path / "out",
        sample_packing_method=method,
        sample_packing_sequence_len=100,
        num_shards=2,
    )
    expected = shifted(table_of(artifact.path))
    epochs = PreparedSamples(artifact.path, "train").epochs()
    assert len(epochs) == 3
    found, per_row = documents(tmp_path / "out")
    ends = np.cumsum(per_row)
    row_ends = np.cumsum(facts["epoch_rows"]["train"])
    assert row_ends[-1] == len(per_row)
    starts = [0, *ends[row_ends - 1].tolist()]
    for epoch, start, end in zip(epochs, starts[:-1], starts[1:], strict=True):
        assert sorted(found[start:end]) == sorted(expected[index] for index in epoch.tolist())
    assert facts["documents"]["train"] == 120
    assert facts["tokens"]["train"] == sum(len(ids) for ids, _ in found)


class Pool(ThreadPoolExecutor):
    """Threads in place of processes, which would take seconds to import what they need."""

    started: list

    def __init__(self, size, context, initializer):
        del initializer
        self.started.append((size, context.get_start_method()))
        super().__init__(size)


@pytest.mark.parametrize(
    ("num_proc", "method", "started"),
    [(1, "spawn", []), (2, "fork", [(2, "fork")]), (9, "forkserver", [(3, "forkserver")])],
)
def test_as_many_processes_write_as_there_is_work_for_started_as_written(
    gsm8k, tmp_path, monkeypatch, num_proc, method, started
):
    monkeypatch.setattr(spread, "ProcessPoolExecutor", Pool)
    # Validation has tokens for one process, a third of the others for two and more.
    monkeypatch.setattr(spread, "MIN_TOKENS_PER_PROCESS", 29_157)
    monkeypatch.setattr(Pool, "started", [], raising=False)
    its = {"sample_packing_sequence_len": 4096, "num_shards": 3, "eval_sample_packing": False}
    prepared, _ = gsm8k
    packed(prepared, tmp_path / "out", num_proc=num_proc, start_method=method, **its)
    assert Pool.started == started


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_rows_are_the_same_however_many_processes_write_them(gsm8k, tmp_path, monkeypatch, method):
    monkeypatch.setattr(spread, "MIN_TOKENS_PER_PROCESS", 1000)
    prepared, _ = gsm8k
    its = {"sample_packing_sequence_len": 4096, "num_shards": 3}
    one = packed(prepared, tmp_path / "one", **its)
    assert packed(prepared, tmp_path / "two", num_proc=2, start_method=method, **its) == one
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_the_seed_decides_which_samples_share_a_row(gsm8k, tmp_path):
    prepared, _ = gsm8k
    its = {"sample_packing_method": "multipack", "sample_packing_sequence_len": 4096}
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        packed(prepared, tmp_path / name, seed=seed, **its)
        found.append(documents(tmp_path / name)[0])
    assert found[0] == found[1] != found[2]
    assert sorted(found[0]) == sorted(found[2])


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


@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_of_each_validation_document_its_data_set_is_told(tmp_path, method):
    files = [
        write_lines(tmp_path / folder / "held.jsonl", samples(np.arange(first, 60, 7)))
        for folder, first in (("a", 3), ("b", 4), ("c", 5))
    ]
    trained = write_lines(tmp_path / "t.jsonl", samples([5, 6]))
    its = {"type": "tokenized"}
    several = prepare((trained, its), test=[(file, its) for file in files])
    prepared, _ = run(several, tmp_path / "p" / "x")
    folder = tmp_path / "out"
    packed(prepared, folder, sample_packing_sequence_len=128, sample_packing_method=method)
    sources = Sources.read(folder / "data" / "validation")
    found, per_row = documents(folder, "validation")
    assert sources is not None
    assert sources.labels == ("held.jsonl#0", "held.jsonl#1", "held.jsonl#2")
    # Lengths tell of which file a document is.
    assert sources.of_documents.tolist() == [(len(ids) - 3) % 7 for ids, _ in found]
    assert PackedRows(folder / "data" / "validation").documents().tolist() == per_row
    one, _ = run(prepare((trained, its), test=[(files[0], its)]), tmp_path / "q" / "x")
    packed(one, tmp_path / "alone", sample_packing_sequence_len=128)
    assert Sources.read(tmp_path / "alone" / "data" / "validation") is None


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
        "share_prompts": False,
        "row_length": "fitted",
        "row_multiple": 64,
        "rows_per_step": 2,
        "kl_pairing": "rotate",
        "kl_rotation_size": 8,
        "kl_max_len": 64,
    }
    stages = [
        stage,
        replace(stage, prepared=Artifact("prepare", "b" * 64, tmp_path)),
        *(replace(stage, settings=PackSettings(**{k: v})) for k, v in changes.items()),
    ]
    assert set(changes) == set(PackSettings.model_fields)
    assert len({stage_key(one) for one in stages}) == len(stages)
    assert stage_key(
        replace(stage, prepared=Artifact("prepare", "a" * 64, tmp_path / "moved"))
    ) == (stage_key(stage))
    assert stage_key(replace(stage, num_proc=9, start_method="fork")) == stage_key(stage)
    assert stage_key(stage)[:16] == "66b89445faeacf42"
    assert json.loads(stage.settings.model_dump_json())["eval_sample_packing"] is True


def test_rows_of_unwritten_length_are_as_long_as_what_they_are_padded_to():
    data = {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]}

    def planned(train=None, **more) -> PackSettings:
        sections = smallest(data={**data, **more})
        sections["train"] = {**sections.get("train", {}), **(train or {})}
        stage = plan(loads(sections), ("pack",)).step("pack").stage
        assert isinstance(stage, Pack)
        return stage.settings

    assert (planned().row_length, planned().row_multiple) == ("fitted", 128)
    assert planned(pad_to_multiple_of=1000).row_multiple == 1000
    written = planned(sample_packing_sequence_len=2000, pad_to_multiple_of=1000)
    assert (written.row_length, written.row_multiple) == ("written", 128)
    assert (planned().rows_per_step, written.rows_per_step) == (1, None)
    assert planned({"micro_batch_size": 2, "gradient_accumulation_steps": 3}).rows_per_step == 6
    assert planned({"global_batch_size": 32}).rows_per_step == 32


@pytest.mark.parametrize("train", [{}, {"micro_batch_size": 2}, {"global_batch_size": 32}])
def test_a_config_has_the_same_rows_on_machines_with_other_numbers_of_ranks(monkeypatch, train):
    data = {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]}
    sections = smallest(data=data)
    sections["train"] = {**sections["train"], "data_parallel_mode": "ddp", **train}
    keys = set[str]()
    for gpus in (0, 1, 8):
        monkeypatch.setattr(env, "num_gpus", lambda count=gpus: count)
        keys.add(plan(loads(sections), ("pack",)).step("pack").artifact.key)
    assert len(keys) == 1


def test_rows_without_a_trained_token_are_counted(tmp_path):
    ids = list(range(40))
    pairs = [(ids, [-100] * masked + ids[masked:]) for masked in (0, 39, 12, 39)]
    artifact = stored(tmp_path / "prepared", pairs)
    its = {"sample_packing_method": "wrapped", "sample_packing_sequence_len": 10, "num_shards": 2}
    out = tmp_path / "packed"
    facts = packed(artifact, out, **its)
    rows = [row.labels for row in map(PackedRows(out / "data" / "train").row, range(16))]
    assert facts["untrained_rows"]["train"] == sum((row == -100).all() for row in rows) > 0
    assert packed(artifact, out, **its) == facts
    whole = packed(stored(tmp_path / "b", pairs), tmp_path / "c", sample_packing_sequence_len=160)
    assert "untrained_rows" not in whole
