"""The counts of each source in packed rows, judged by the rows themselves."""

import pyarrow as pa
import pytest

from penstock.cli.packed_sources import packed_sources_table
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.prepare.settings import MixSettings
from penstock.train.report.sections import _packed_sources
from tests.stages.prepared import prepare, run, write_lines

SIZES = {"a": 3, "b": 17}


@pytest.mark.parametrize("method", ["sequential", "wrapped"])
def test_sources_are_counted_in_the_rows_that_are_written(tmp_path, method):
    paths = [
        write_lines(
            tmp_path / f"{word}.jsonl", [{"text": word * (size + n % 5)} for n in range(25)]
        )
        for word, size in SIZES.items()
    ]
    mix = (MixSettings(), MixSettings(loss_weight=0.0))
    stage = prepare(*((path, {"type": "text"}) for path in paths), mix=mix, val_set_size=9)
    artifact, _ = run(stage, tmp_path / "prepared")
    settings = PackSettings(
        sample_packing_sequence_len=32, sample_packing_method=method, num_shards=3
    )
    out = tmp_path / "packed"
    out.mkdir()
    facts = Pack(settings, artifact).run(out)
    assert Pack(settings, artifact).run(out) == facts  # from files that are there already
    for split in ("train", "validation"):
        files = sorted((out / "data" / split).glob("*.arrow"))
        rows = [row for file in files for row in pa.ipc.open_file(file).read_all().to_pylist()]
        for source, (word, weight) in zip(
            facts["sources"][split], {"a": 1, "b": 0}.items(), strict=True
        ):
            letter = ord(word)
            ids = [(row["input_ids"], row["labels"]) for row in rows]
            tokens = sum(tokens.count(letter) for tokens, _ in ids)
            ends = source["tokens"] - tokens
            assert 0 < ends <= 25  # the end token of each sample
            assert source["label"].startswith(word)
            assert source["rows"] >= sum(letter in tokens for tokens, _ in ids)
            assert (source["trained_tokens"] > 0) == (weight > 0)
            assert source["fill"] == pytest.approx(source["tokens"] / (32 * len(rows)), abs=1e-6)
        totals = {
            name: sum(source[name] for source in facts["sources"][split])
            for name in ("tokens", "trained_tokens", "fill")
        }
        assert totals["trained_tokens"] == sum(
            label != -100 for row in rows for label in row["labels"]
        )
        assert totals["tokens"] == facts["tokens"][split]
        assert totals["fill"] == pytest.approx(facts["fill"][split], abs=2e-6)
    text = packed_sources_table(facts)
    table = _packed_sources(facts["sources"])
    assert len(text.splitlines()) == len(table) == 5
    assert f"{facts['sources']['train'][0]['tokens']:,}" in text


def test_a_split_of_a_single_source_has_an_empty_list(tmp_path):
    files = [write_lines(tmp_path / f"{word}.jsonl", 5 * [{"text": word}]) for word in "ab"]
    stage = prepare(*((file, {"type": "text"}) for file in files), val_set_size=1)
    artifact, _ = run(stage, tmp_path / "prepared")
    (tmp_path / "packed").mkdir()
    facts = Pack(PackSettings(sample_packing_sequence_len=32), artifact).run(tmp_path / "packed")
    assert len(facts["sources"]["train"]) == 2
    assert facts["sources"]["validation"] == []
