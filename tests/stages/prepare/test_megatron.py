"""Megatron-LM's indexed datasets are read as their documents, and nothing else is taken for one."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.loading.load import loads
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError, StageError
from penstock.core.sources.megatron_files import split_range
from penstock.core.sources.pin import pin_data
from penstock.pipeline.plan import plan
from penstock.prepare.readers import file_splits
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.megatron import read_documents
from penstock.prepare.stage import Prepare
from tests.config.values import faults_of, smallest
from tests.stages.prepare.megatron_files import write_cached, write_mapped
from tests.stages.prepared import prepare, run, table_of

LARGEST = {1: 255, 2: 127, 3: 258, 4: 258, 5: 258, 8: 258}
"""A token id that fits the type and the byte-level vocabulary."""

CODES = st.sampled_from(sorted(LARGEST))
WRITERS = st.sampled_from([write_mapped, write_cached])


SEQUENCES = st.lists(st.integers(0, 127), max_size=9)
DOCUMENTS = st.lists(st.lists(SEQUENCES, min_size=1, max_size=3), min_size=1, max_size=30)


def joined(document):
    return [token for sequence in document for token in sequence]


def ids_in(folder, split="train"):
    return table_of(folder, split)["input_ids"].to_pylist()


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS, CODES, WRITERS, st.sampled_from([16, 1 << 24]))
def test_documents_are_read_as_they_were_written(tmp_path_factory, documents, code, write, size):
    here = tmp_path_factory.mktemp("megatron")
    documents = [*documents, [[LARGEST[code], 1]]]
    prefix = write(here / "corpus_text_document", documents, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_splits, "SLICE_BYTES", size)
        artifact, facts = run(prepare((prefix, {})), here / "out" / "x")
    # A document of one token has no target, and one of none has nothing at all.
    expected = [joined(one) for one in documents if len(joined(one)) > 1]
    table = table_of(artifact.path)
    assert table["input_ids"].to_pylist() == expected
    assert table["labels"].to_pylist() == expected
    assert facts["records"] == len(documents)
    assert sum(facts["dropped"].values()) == len(documents) - len(expected)


@pytest.mark.parametrize("typed", ["corpus", "corpus.idx", "corpus.bin"])
def test_a_prefix_and_either_file_name_the_same_data(tmp_path, monkeypatch, typed):
    (tmp_path / "d").mkdir()
    prefix = write_mapped(tmp_path / "d" / "corpus", [[[1, 2, 3]]])
    by_prefix = pin_data(str(prefix))
    assert [path.name for path in by_prefix.paths] == ["corpus.idx", "corpus.bin"]
    assert pin_data(str(tmp_path / "d" / typed)) == by_prefix
    monkeypatch.chdir(tmp_path)
    assert pin_data(f"d/{typed}").key == by_prefix.key


def test_the_key_is_that_of_both_files_content(tmp_path):
    prefix = write_mapped(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]])
    before = stage_key(prepare((prefix, {})))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert (
        stage_key(prepare((write_mapped(moved / "corpus", [[[1, 2, 3]], [[4, 5]]]), {}))) == before
    )
    tokens = prefix.with_name("corpus.bin")
    tokens.write_bytes(tokens.read_bytes()[:-4] + struct.pack("<i", 6))
    assert stage_key(prepare((prefix, {}))) != before
    # The same tokens in other documents are other data.
    assert stage_key(prepare((write_mapped(prefix, [[[1, 2]], [[3, 4, 5]]]), {}))) != before


def test_slices_are_made_again_only_where_their_files_have_changed(tmp_path):
    first = write_mapped(tmp_path / "a", [[[1, 2, 3]]])
    second = write_mapped(tmp_path / "b", [[[4, 5, 6]]])
    stage = prepare((first, {}), (second, {}))
    before = [item.key for item in stage.slices()]
    write_mapped(second, [[[4, 5, 7]]])
    after = [item.key for item in prepare((first, {}), (second, {})).slices()]
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("shares", ["980,10,10", "90,10", "1", "0.5,0.25,0.25", "0,1,1", "3/1/1"])
@pytest.mark.parametrize("documents", [0, 1, 2, 7, 100, 1001])
def test_splits_share_out_all_documents_in_order(shares, documents):
    numbers = [float(share) for share in shares.replace("/", ",").split(",")]
    found = [split_range(documents, shares, part) for part in ("train", "validation", "test")]
    assert [n for part in found for n in part] == list(range(documents))
    for part, share in zip(found, [*numbers, 0, 0], strict=False):
        assert abs(len(part) - documents * share / sum(numbers)) <= 1.5


def test_a_source_reads_the_documents_of_its_split_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 40)
    documents = [[[n, n]] for n in range(50)]
    prefix = write_mapped(tmp_path / "corpus", documents)

    def read(part):
        its = {"document_split": ("80,10,10", part)}
        artifact, _ = run(prepare((prefix, its)), tmp_path / part / "x")
        return [ids[0] for ids in ids_in(artifact.path)]

    assert read("train") == list(range(40))
    assert read("validation") == list(range(40, 45))
    assert read("test") == list(range(45, 50))


def test_a_folder_is_megatrons_only_where_that_is_written(tmp_path):
    write_mapped(tmp_path / "a", [[[1, 2]]])
    write_mapped(tmp_path / "b", [[[3, 4]]])
    with pytest.raises(ConfigError, match="holds no file"):
        pin_data(str(tmp_path))
    names = [path.name for path in pin_data(str(tmp_path), ds_type="megatron").paths]
    assert names == ["a.idx", "a.bin", "b.idx", "b.bin"]
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ConfigError, match=r"index without its data: b\.bin"):
        pin_data(str(tmp_path), ds_type="megatron")
    with pytest.raises(ConfigError, match=r"Copy its \.bin and \.idx"):
        pin_data("s3://bucket/corpus", ds_type="megatron")


def broken(prefix, what):
    index, data = prefix.with_name("corpus.idx"), prefix.with_name("corpus.bin")
    raw = bytearray(index.read_bytes())
    if what == "short data":
        data.write_bytes(data.read_bytes()[:-1])
    elif what == "short index":
        index.write_bytes(raw[:-3])
    elif what == "long index":
        index.write_bytes(bytes(raw) + b"abc")
    elif what == "magic":
        index.write_bytes(b"PK" + raw[2:])
    elif what == "version":
        raw[9] = 2
        index.write_bytes(raw)
    elif what == "floats":
        raw[17] = 6
        index.write_bytes(raw)
    elif what == "type":
        raw[17] = 99
        index.write_bytes(raw)
    elif what == "documents":
        index.write_bytes(raw[:-8] + struct.pack("<q", 7))
    elif what == "modes":
        write_mapped(prefix, [[[1, 2, 3]], [[4, 5]]], modes=[1, 0])
    return prefix


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("short data", "corpus.bin has 19 bytes, but corpus.idx refers to 20: it is truncated"),
        ("short index", "it is truncated"),
        ("long index", "bytes follow its last entry"),
        ("magic", "not a Megatron index: it starts with"),
        ("version", "it has version 2; only version 1 is supported"),
        ("floats", "floating-point dtype, not token ids"),
        ("type", "99 is not the code of a token dtype"),
        ("documents", "its documents do not cover its sequences"),
        ("modes", "its sequences have modes"),
    ],
)
def test_files_that_are_damaged_are_refused_with_the_reason(tmp_path, what, says):
    prefix = broken(write_mapped(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]]), what)
    with pytest.raises(StageError, match=says):
        run(prepare((prefix, {})), tmp_path / "out" / "x")


HOSTILE = (-(2**63), -1, 2**40, 2**61, 2**62, 2**63 - 1)


@pytest.mark.parametrize("write", [write_mapped, write_cached])
def test_no_number_of_an_index_leads_outside_of_its_data(tmp_path, write):
    prefix = write(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5, 6]]])
    index, data = (prefix.with_name(f"corpus{end}") for end in (".idx", ".bin"))
    file = SourceFile(index.name, index, data_file=SourceFile(data.name, data))
    whole, refused = index.read_bytes(), 0
    places = range(0, len(whole) - 7, 2)
    for at in places:
        for number in HOSTILE:
            index.write_bytes(whole[:at] + struct.pack("<q", number) + whole[at + 8 :])
            try:
                for chunk in read_documents(file, None):
                    chunk.part(0, None).values()
            except StageError:
                refused += 1
    assert refused > 0.9 * len(HOSTILE) * len(places)


def test_an_id_outside_of_the_vocabulary_is_told_with_its_document(tmp_path):
    prefix = write_mapped(tmp_path / "corpus", [[[1, 2]], [[3, 40_000]]])
    with pytest.raises(StageError, match="input_ids holds 40000; the vocabulary") as error:
        run(prepare((prefix, {})), tmp_path / "out" / "x")
    assert "corpus.idx, record 2" in str(error.value)


def test_weights_may_be_shares_of_tokens(tmp_path):
    short = write_mapped(tmp_path / "short", [[[n % 100] * 10] for n in range(400)])
    long = write_mapped(tmp_path / "long", [[[n % 100] * 40] for n in range(400)])
    mix = [{"weight": 0.5}, {"weight": 0.5}]

    def drawn(unit):
        stage = prepare(
            (short, {}), (long, {}), mix=mix, mix_strategy="random", weight_unit=unit, epochs=1
        )
        _, facts = run(stage, tmp_path / unit / "x")
        return [source["drawn"] for source in facts["sources"]]

    assert drawn("samples") == [400, 400]
    by_tokens = drawn("tokens")
    assert by_tokens == [640, 160]
    assert by_tokens[0] * 10 == by_tokens[1] * 40


@pytest.mark.parametrize(
    ("dataset", "where", "says"),
    [
        ({"ds_type": "megatron", "type": "text"}, "type", "contain token ids"),
        ({"path": "a.idx", "type": "chat"}, "type", "contain token ids"),
        ({"ds_type": "json", "splits_string": "9,1"}, "splits_string", "ds_type is json"),
        ({"splits_string": "9,1", "split": "valid"}, "split", "train, validation, test"),
        ({"splits_string": "9,x"}, "splits_string", "write the shares of train"),
        ({"splits_string": "0,0,0"}, "splits_string", "write the shares of train"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(dataset, where, says):
    [fault] = faults_of(data={"datasets": [{"path": "corpus", **dataset}]})
    assert fault.startswith(f"data.datasets.0.{where}: ")
    assert says in fault


def test_a_run_of_a_foreign_file_is_planned_on_the_documents_of_its_splits(tmp_path):
    prefix = write_mapped(tmp_path / "corpus", [[[n, n, n]] for n in range(100)], 8)
    source = {"path": str(prefix), "ds_type": "megatron", "splits_string": "90,10,0"}
    run_config = loads(
        smallest(
            data={
                "datasets": [source],
                "test_datasets": [{**source, "split": "validation"}],
                "dataset_prepared_path": str(tmp_path / "data"),
                "sample_packing_method": "wrapped",
                "sample_packing_sequence_len": 16,
            },
            model={"config_path": "builtin:tiny-qwen3"},
        )
    )
    stage = plan(run_config, ("prepare",)).steps[0].stage
    assert isinstance(stage, Prepare)
    artifact, _ = run(stage, tmp_path / "out" / "x")
    read = [ids[0] for ids in ids_in(artifact.path)]
    held = [ids[0] for ids in ids_in(artifact.path, "validation")]
    assert (read, held) == (list(range(90)), list(range(90, 100)))
    assert json.loads((artifact.path / "plan.json").read_text())["splits"]["validation"]


def test_pieces_follow_one_another_and_are_of_about_a_slice(tmp_path, monkeypatch):
    monkeypatch.setattr(file_splits, "SLICE_BYTES", 64)
    prefix = write_mapped(tmp_path / "corpus", [[[1] * (1 + n % 20)] for n in range(60)])
    slices = prepare((prefix, {})).slices()
    spans = [item.pieces[0].span or (0, 0) for item in slices]
    assert spans[0][0] == 0
    assert spans[-1][1] == 60
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert len(spans) > 10
    assert np.mean([item.num_bytes for item in slices]) < 2 * 64


def test_a_split_without_documents_is_an_error_and_not_a_source_that_is_left_out(tmp_path):
    few = write_mapped(tmp_path / "few", [[[n, n]] for n in range(30)])
    more = write_mapped(tmp_path / "more", [[[n, n]] for n in range(100)])
    held = {"document_split": ("980,10,10", "validation")}
    run(prepare((more, held)), tmp_path / "out" / "x")
    says = r"few.* has 30 documents, of which splits_string \(980,10,10\) gives none to validation"
    with pytest.raises(StageError, match=says):
        run(prepare((more, {}), (few, held)), tmp_path / "out" / "y")
