"""Mixing and selecting as plans over slices: what they store, what they reuse, what is told."""

import json
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest

from penstock.core.cache.stage import stage_key
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import StageError
from penstock.prepare import workers
from penstock.prepare.mix import build_mixer
from penstock.prepare.settings import MixSettings
from penstock.rows.prepared import PreparedSamples
from tests.stages.prepared import contents, prepare, run, said, table_of, texts, write_lines

TEXT = {"type": "text"}


def two(tmp_path, **settings):
    paths = [write_lines(tmp_path / f"{w}.jsonl", texts(n, w)) for w, n in (("a", 60), ("b", 20))]
    return prepare(*((path, TEXT) for path in paths), **settings)


def weights(*values):
    return tuple(MixSettings(weight=value) for value in values)


OTHERWISE = {
    "weights": {"mix_strategy": "random", "mix": weights(1, 5), "epochs": 3},
    "epoch": {"mix_strategy": "random", "samples_per_epoch": 7, "epochs": 2},
    "under": {"mix_strategy": "interleave_under"},
    "over": {"mix_strategy": "interleave_over", "mix": weights(2, 1)},
    "seed": {"seed": 7, "val_set_size": 9},
    "validation": {"val_set_size": 0.3},
    "merged": {"shuffle_merged_datasets": False},
    "before": {"shuffle_before_merging_datasets": False},
    "one source": {"mix": weights(1, 0)},
    "fewer": {"mix": (MixSettings(max_samples=5), MixSettings())},
    "files": {"num_dataset_shards_to_save": 3},
    "repeats": {"deduplicate": "near"},
}


def slices_in(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.arrow")}


@pytest.mark.slow
def test_mixing_otherwise_tokenizes_nothing(tmp_path, monkeypatch):
    stage = two(tmp_path)
    get_or_build(PlannedStage(stage, tmp_path / "root" / "prepare" / "first"))
    made = slices_in(tmp_path / "root" / "slices")
    assert len(made) == 2
    monkeypatch.setattr(workers, "tokenize", None)  # whoever calls it now fails
    for name, changes in OTHERWISE.items():
        other = replace(stage, settings=stage.settings.model_copy(update=changes))
        assert stage_key(other) != stage_key(stage)
        out = tmp_path / "root" / "prepare" / name.replace(" ", "-")
        get_or_build(PlannedStage(other, out))
        order = [epoch.tolist() for epoch in PreparedSamples(out, "train").epochs()]
        first = PreparedSamples(tmp_path / "root" / "prepare" / "first", "train").epochs()
        assert order != [epoch.tolist() for epoch in first] or name in ("files", "repeats")
    assert slices_in(tmp_path / "root" / "slices") == made


def test_sources_are_drawn_by_their_weights_and_the_facts_tell_it(tmp_path):
    stage = two(tmp_path, mix_strategy="random", mix=weights(1, 3), samples_per_epoch=40, epochs=3)
    _, facts = run(stage, tmp_path / "out")
    samples = PreparedSamples(tmp_path / "out", "train")
    texts_of = said(table_of(tmp_path / "out"))
    epochs = samples.epochs()
    for epoch in epochs:
        assert Counter(texts_of[index][0] for index in epoch) == {"a": 10, "b": 30}
    drawn = Counter(index for epoch in epochs for index in epoch.tolist() if index < 60)
    assert set(drawn.values()) == {1}  # 30 draws of 60: none comes again
    assert facts["rows"]["train"] == 80
    assert (facts["samples_per_epoch"], facts["epochs"]) == (40, 3)
    told = [(s["samples"], s["drawn"], s["share"]) for s in facts["sources"]]
    assert told == [(60, 10, 0.25), (20, 30, 0.75)]
    for source, word in zip(facts["sources"], "ab", strict=True):
        its = [len(text) + 1 for text in texts_of if text[0] == word]  # and the end token
        assert source["tokens"] == sum(its)
        assert source["trained_tokens"] == sum(its) - len(its)


def test_a_source_of_weight_0_is_not_even_read(tmp_path):
    stage = two(tmp_path, mix=weights(1, 0))
    (tmp_path / "b.jsonl").write_text("{")
    _, facts = run(stage, tmp_path / "out")
    assert {text[0] for text in said(table_of(tmp_path / "out"))} == {"a"}
    assert [source["label"] for source in facts["sources"]] == ["a.jsonl"]
    assert PreparedSamples(tmp_path / "out", "train").epochs()[0].max() == 59


def test_what_is_left_out_is_counted_and_told(tmp_path):
    records = [*texts(30), *texts(4), {"text": f"{'hidden ' * 5}{texts(1)[0]['text']}"}]
    path = write_lines(tmp_path / "a.jsonl", records)
    avoid = write_lines(tmp_path / "test.jsonl", [{"text": "hidden hidden hidden"}])
    stage = prepare((path, TEXT), avoid=[(avoid, TEXT)], deduplicate="exact", val_set_size=5)
    _, facts = run(stage, tmp_path / "out")
    assert facts["dropped"] == {"contaminated": 1, "exact_duplicate": 4}
    assert facts["rows"] == {"train": 25, "validation": 5}
    assert facts["records"] == 35
    told = {(e["source"], e["row"], e["reason"]) for e in facts["dropped_samples"]}
    assert ("a.jsonl", 34, "contaminated") in told
    assert ("a.jsonl", 30, "exact_duplicate") in told
    assert [s["role"] for s in facts["sources"]] == ["train", "avoid"]
    assert (facts["sources"][0]["samples"], facts["sources"][0]["held_out"]) == (25, 5)
    stored = said(table_of(tmp_path / "out")) + said(table_of(tmp_path / "out", "validation"))
    assert sorted(stored) == sorted(record["text"] for record in texts(30))


@pytest.mark.slow
def test_a_new_file_leaves_most_files_of_an_artifact_as_they_are(tmp_path):
    files = 12
    for n in range(files):
        write_lines(tmp_path / "data" / f"{n:02d}.jsonl", texts(40, f"x{n}-"))
    root = tmp_path / "root" / "prepare"
    first = get_or_build(
        PlannedStage(prepare((tmp_path / "data", TEXT), val_set_size=0.05), root / "first")
    )
    write_lines(tmp_path / "data" / "new.jsonl", texts(4, "new"))
    stage = prepare((tmp_path / "data", TEXT), val_set_size=0.05)
    second = get_or_build(PlannedStage(stage, root / "second"))
    assert second.facts["records"] == first.facts["records"] + 4
    before, after = (
        {p.name: p.stat().st_ino for p in (root / name / "data" / "train").iterdir()}
        for name in ("first", "second")
    )
    assert len(set(before.items()) & set(after.items())) >= files - 2
    alone = tmp_path / "alone" / "prepare" / "second"
    get_or_build(PlannedStage(stage, alone))
    assert not set(before.values()) & {p.stat().st_ino for p in alone.rglob("*.arrow")}
    assert contents(alone / "data") == contents(root / "second" / "data")
    assert (alone / "plan.json").read_bytes() == (root / "second" / "plan.json").read_bytes()


def test_a_file_of_a_sealed_artifact_that_was_changed_is_not_taken_over(tmp_path):
    root = tmp_path / "root" / "prepare"
    stage = two(tmp_path, val_set_size=20)
    get_or_build(PlannedStage(stage, root / "first"))
    for path in (root / "first" / "data").rglob("*.arrow"):
        path.write_bytes(path.read_bytes()[:-8] + b"tampered")
    changed = stage.settings.model_copy(update={"shuffle_merged_datasets": False})
    get_or_build(PlannedStage(replace(stage, settings=changed), root / "second"))
    get_or_build(PlannedStage(stage, tmp_path / "alone" / "prepare" / "first"))
    whole = contents(tmp_path / "alone" / "prepare" / "first" / "data")
    assert contents(root / "second" / "data") == whole


@pytest.mark.parametrize("wanted", [1, 2, 5])
def test_files_cut_otherwise_hold_several_sources_and_are_read_by_datasets(tmp_path, wanted):
    stage = two(tmp_path, num_dataset_shards_to_save=wanted, val_set_size=11)
    _, facts = run(stage, tmp_path / "out")
    plain = two(tmp_path, val_set_size=11)
    run(plain, tmp_path / "plain")
    files = sorted(str(path) for path in (tmp_path / "out" / "data" / "train").glob("slice-*"))
    assert len(files) == wanted
    loaded = datasets.load_dataset("arrow", data_files=files, cache_dir=str(tmp_path / "cache"))
    assert len(loaded["train"]) == facts["rows"]["train"] == 69
    table, expected = table_of(tmp_path / "out"), table_of(tmp_path / "plain")
    assert table.to_pylist() == expected.to_pylist()
    sizes = [
        e["rows"] for e in json.loads((tmp_path / "out/plan.json").read_text())["splits"]["train"]
    ]
    assert max(sizes) - min(sizes) <= 1
    samples = PreparedSamples(tmp_path / "out", "train")
    assert samples.datasets().tolist() == [int(text[0] == "b") for text in said(table)]
    one, other = (
        PreparedSamples(tmp_path / name, "train").epochs()[0] for name in ("out", "plain")
    )
    assert np.array_equal(one, other)


def test_an_attempt_that_ended_while_files_were_laid_out_goes_on_to_the_same_bytes(tmp_path):
    stage = two(tmp_path, val_set_size=0.2, deduplicate="near", slices=tmp_path / "slices")
    _, facts = run(stage, tmp_path / "whole")
    run(stage, tmp_path / "broken")
    (tmp_path / "broken" / "plan.json").unlink()
    lost = min((tmp_path / "broken" / "data" / "train").iterdir())
    lost.rename(lost.with_name(f"{lost.name}.part"))
    assert run(stage, tmp_path / "broken")[1] == facts
    lost.with_name(f"{lost.name}.part").unlink(missing_ok=True)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_sample_is_shown_with_its_place(tmp_path):
    records = texts(30)
    records[3] = {"text": ""}
    path = write_lines(tmp_path / "a.jsonl", records)
    run(prepare((path, TEXT), val_set_size=7), tmp_path / "out")
    found = []
    for split in ("train", "validation"):
        samples = PreparedSamples(tmp_path / "out", split)
        assert samples.trained().tolist() == (samples.lengths() - 1).tolist()
        for index in range(len(samples)):
            sample = samples.sample(index)
            ids, labels = sample.sides[""]
            assert ids.tolist() == labels.tolist()
            assert len(ids) == samples.lengths()[index]
            found.append((sample.row, bytes(ids[ids < 256].astype(np.uint8)).decode()))
            assert (sample.source, sample.dataset) == ("a.jsonl", 0)
        with pytest.raises(IndexError):
            samples.sample(len(samples))
    assert sorted(found) == [(n, r["text"]) for n, r in enumerate(records) if r["text"]]


def test_settings_without_a_mix_weigh_all_sources_alike(tmp_path):
    assert build_mixer(two(tmp_path).settings).weights == (1.0, 1.0)


@pytest.mark.parametrize(("unit", "fits"), [("samples", True), ("tokens", False)])
def test_an_epoch_is_judged_by_the_weights_that_it_is_drawn_with(tmp_path, monkeypatch, unit, fits):
    sources = []
    for name, length in (("short", 2), ("long", 200)):
        records = [{"input_ids": [1] * length, "labels": [1] * length} for _ in range(20)]
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        sources.append((path, {"type": "tokenized"}))
    stage = prepare(*sources, mix_strategy="interleave_over", weight_unit=unit)
    # As many tokens of either are some 100 short samples to a long one: 20 of these take 2,000.
    monkeypatch.setattr("penstock.prepare.mix.MAX_DRAWS", 500)
    if fits:
        run(stage, tmp_path / "out" / "x")
        return
    with pytest.raises(
        StageError, match=r"long.jsonl \(data.datasets.1\) has 20 samples and so small"
    ):
        run(stage, tmp_path / "out" / "x")
