"""Settings of data sets and packing whose work no other test would miss."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from datasets import load_dataset

from penstock.config.loading.load import loads
from penstock.config.schema.dataset import MAX_RECORD_BYTES
from penstock.core.cache.stage import Source
from penstock.core.sources.pin import pin_data
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.pipeline.plan import dataset_settings
from penstock.prepare import workers
from penstock.prepare.infer_type import read_first
from penstock.rows.tokenizer import byte_tokenizer
from tests.config.values import smallest
from tests.stages.prepared import prepare, run, said, table_of, texts, write_lines

TEXT = {"type": "text"}
CARD = """---
configs:
- config_name: first
  data_files:
  - {split: train, path: first.jsonl}
  - {split: test, path: held.jsonl}
- config_name: third
  data_files:
  - {split: test, path: held.jsonl}
- config_name: second
  data_files: second.jsonl
---
"""


@pytest.fixture
def hub_data(tmp_path, monkeypatch):
    """A source maker for a data set laid out as on the hub, with two subsets."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("first", "held", "second"):
        repo = write_lines(tmp_path / "repo" / f"{name}.jsonl", texts(3, name)).parent
    (repo / "README.md").write_text(CARD)

    def source(**its):
        pin = pin_data("org/data", revision="0" * 40, **its).pin
        return Source({**pin, "repo": str(repo)})

    return source


@pytest.mark.parametrize(
    ("its", "word"),
    [
        ({"name": "first"}, "first"),
        ({"name": "second"}, "second"),
        ({"name": "first", "split": "test"}, "held"),
        ({"name": "third"}, "held"),
        ({"data_files": "held.jsonl"}, "held"),
    ],
)
def test_of_a_hub_data_set_the_named_part_is_read(its, word, hub_data, tmp_path):
    stage = replace(prepare(("dummy", TEXT)), sources=(hub_data(**its),))
    run(stage, tmp_path / "out")
    assert said(table_of(tmp_path / "out")) == [record["text"] for record in texts(3, word)]


@pytest.mark.parametrize(
    "split",
    [
        *("train[:10%]", "train[1%:]", "train[5:]", "train[5:8]", "train[:3]"),
        *("train+test", "train[-3:]", "test", "train[10%:20%]", "train[3:]+test[:1]", "train[:2%]"),
    ],
)
@pytest.mark.parametrize("count", [30, 300])
def test_the_first_records_of_a_slice_are_those_that_are_prepared(
    split, count, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("train", "test"):
        repo = write_lines(tmp_path / "repo" / f"{name}.jsonl", texts(count, name)).parent
    source = Source({**pin_data("org/data", revision="0" * 40, split=split).pin, "repo": str(repo)})
    rows = load_dataset(str(repo), split=split)
    assert (
        read_first(source, None, None, MAX_RECORD_BYTES)
        == rows.select(range(min(20, len(rows)))).to_list()
    )


def test_files_of_unknown_names_are_read_as_ds_type_says(tmp_path):
    path = write_lines(tmp_path / "rows.data", texts(3))
    for kind, first in (("json", texts(1)[0]["text"]), ("text", '{"text": "t0 "}')):
        run(prepare((path, {**TEXT, "ds_type": kind})), tmp_path / kind)
        assert said(table_of(tmp_path / kind))[0] == first


def test_messages_and_text_are_taken_from_the_columns_that_are_named(tmp_path):
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "mine"}]
    wrong = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "other"}]
    record = {"turns": turns, "messages": wrong, "body": "mine", "text": "other"}
    path = write_lines(tmp_path / "a.jsonl", [record])
    for its in ({"type": "chat", "field_messages": "turns"}, {**TEXT, "field_text": "body"}):
        run(prepare((path, its)), tmp_path / its["type"])
        [sample] = said(table_of(tmp_path / its["type"]))
        assert "mine" in sample
        assert "other" not in sample


def test_samples_are_made_with_the_tokenizer_that_is_named(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}={{ m['content'] }};{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "mine")
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": turns}])
    run(prepare((path, {"type": "chat"}), tokenizer=str(tmp_path / "mine")), tmp_path / "out")
    assert said(table_of(tmp_path / "out")) == ["user=u;assistant=a;"]


class Pool(ThreadPoolExecutor):
    """Threads in place of processes, which would take seconds to import what they need."""

    sizes: list[int]

    def __init__(self, size, *_):
        self.sizes.append(size)
        super().__init__(size)


@pytest.mark.parametrize(("num_proc", "sizes"), [(1, []), (2, [2]), (9, [3])])
def test_slices_are_spread_over_as_many_processes_as_written(
    num_proc, sizes, tmp_path, monkeypatch
):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(workers, "MIN_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(Pool, "sizes", [], raising=False)
    paths = [write_lines(tmp_path / f"{name}.jsonl", texts(4, name)) for name in "abc"]
    stage = prepare(*((path, TEXT) for path in paths), num_proc=num_proc)
    _, facts = run(stage, tmp_path / "out")
    assert Pool.sizes == sizes  # never more than there are slices
    assert facts["rows"]["train"] == 12


@pytest.mark.parametrize(("group_size", "rows"), [(100_000, 2), (2, 3)])
def test_only_samples_of_one_group_share_a_row(group_size, rows, tmp_path):
    records = [{"input_ids": [7] * n, "labels": [7] * n} for n in (60, 60, 4, 4)]
    path = write_lines(tmp_path / "a.jsonl", records)
    artifact, _ = run(prepare((path, {}), shuffle_merged_datasets=False), tmp_path / "p" / "x")
    settings = PackSettings(
        sample_packing_method="multipack",
        sample_packing_sequence_len=64,
        sample_packing_group_size=group_size,
    )
    (tmp_path / "out").mkdir()
    facts = Pack(settings, artifact).run(tmp_path / "out")
    assert facts["rows"]["train"] == rows


def test_the_settings_of_one_data_set_read_no_other():
    run = loads(smallest())
    others = run.data.model_copy(update={"datasets": [object()] * 9})  # a warning if dumped
    alone = dataset_settings(run, run.data.datasets[0], "train")
    among = run.model_copy(update={"data": others})
    assert dataset_settings(among, run.data.datasets[0], "train") == alone
