"""Steps that are told before a run, beside those of the batches that it takes."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from penstock.config.loading.load import loads
from penstock.core.sources.pin import pin_data
from penstock.estimate.costs.file_sizes import FileSizes, estimate_samples
from penstock.estimate.costs.token_counts import Data, estimate_length, estimate_work
from penstock.models.flops import Work
from penstock.models.registry import get_family
from penstock.rows.batches import StepSampler
from tests.cli.command import penstock, small_run
from tests.config.values import smallest
from tests.stages.prepare.megatron_files import write_mapped

CHAT = [
    {"role": "user", "content": "What is a penstock? " * 3},
    {"role": "assistant", "content": "A gate, and the pipe behind it. " * 5},
]


@given(
    blocks=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    rows=st.integers(1, 12),
    epochs=st.sampled_from([1, 2, 3, 0.5, 1.25, 2.75]),
    drops=st.booleans(),
)
def test_steps_are_those_that_the_run_takes(blocks, rows, epochs, drops):
    run = loads(smallest(data={"dataloader_drop_last": drops}, train={"num_train_epochs": epochs}))
    data = Data(tuple(blocks), 100 * sum(blocks), sum(blocks), sum(blocks), "counted")
    batches = StepSampler(
        np.ones(sum(blocks), np.int64),
        rows_per_step=rows,
        seed=0,
        last_batch="drop" if drops else "keep",
        epoch_rows=tuple(blocks),
    )
    told = estimate_length(run, data, rows)
    assert told
    assert told.steps == batches.steps_until(Fraction(str(epochs)), batches.start())
    assert (told.certain, told.set_by) == ("counted", "num_train_epochs")


def test_a_written_number_of_steps_is_known_without_data():
    run = loads(smallest(train={"max_steps": 7}))
    told = estimate_length(run, None, 4)
    assert told
    assert (told.steps, told.set_by) == (7, "max_steps")
    assert estimate_length(loads(smallest()), None, 4) is None
    only = smallest(data={"val_set_size": 2}, train={"eval_only": True})
    evaluating = estimate_length(loads(only), None, 4)
    assert evaluating
    assert evaluating.steps == 0


def test_a_number_of_tokens_ends_a_run_with_the_step_that_reaches_it():
    run = loads(smallest(train={"max_tokens": 1000}))
    data = Data((50,), 50 * 60, 100, 3000, "counted")
    told = estimate_length(run, data, 4)
    assert told
    assert told.steps == -(-1000 // (4 * 60))


def test_a_step_compares_tokens_within_documents_as_long_as_the_datas():
    hf = AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=16, num_hidden_layers=1).to_dict()
    config = get_family(hf).read(hf)
    run = loads(smallest(data={"sample_packing_sequence_len": 256}))
    data = Data((10,), 10 * 240, 10 * 4, 10 * 120, "counted")
    want = Work.from_lengths(config, [60] * 12, logits=12 * 30)
    assert estimate_work(config, run, data, 3) == want
    assert estimate_work(config, run, None, 3) == Work.from_lengths(config, [256] * 3)


@pytest.mark.parametrize(
    ("name", "type_", "lines"),
    [
        ("chats.jsonl", "chat", [json.dumps({"messages": CHAT}) + "\n"] * 400),
        ("rows.json", "chat", [json.dumps([{"messages": CHAT}] * 400, indent=1)]),
        (
            "rows.csv",
            "alpaca",
            ["instruction,output\n", *(400 * [f'"{"ask " * 12}",{"tell " * 9}\n'])],
        ),
        ("rows.txt", "text", [f"{'a line of words ' * 6}\n"] * 400),
    ],
)
def test_data_that_is_not_prepared_is_estimated_from_its_first_records(
    name, type_, lines, tmp_path
):
    (tmp_path / name).write_text("".join(lines))
    dataset = {"path": str(tmp_path / name), "type": type_}
    data = {"datasets": [dataset], "dataset_num_proc": 1, "sample_packing_sequence_len": 1024}
    config = small_run(tmp_path, data=data)
    found = []
    for _ in range(2):
        found.append(penstock("plan", config, "--json").last["costs"]["length"])
        penstock("prepare", config)
    before, after = found
    assert penstock("pack", config).code == 0
    packed = penstock("plan", config, "--json").last["costs"]["length"]
    assert packed["least"] == packed["steps"] == packed["most"]
    for estimate in found:
        assert estimate["least"] <= packed["steps"] <= estimate["most"]
    assert before["most"] / before["least"] > after["most"] / after["least"] > 1
    assert 0.6 < before["steps"] / after["steps"] < 1.6
    assert 0.6 < before["tokens"] / after["tokens"] < 1.6


@pytest.mark.parametrize("code", [4, 8], ids=["4 bytes", "2 bytes"])
def test_tokens_of_indexed_documents_are_counted_before_they_are_prepared(tmp_path, code):
    documents = [[[7] * (5 + number % 60)] for number in range(300)]
    prefix = write_mapped(tmp_path / "corpus", documents, code)
    found = estimate_samples([pin_data(str(prefix), ds_type="megatron")], 50_257)
    assert found == FileSizes(sum(len(one[0]) for one in documents), 300, 64, longest_record=64)


def test_rows_are_estimated_of_the_samples_that_a_run_uses(tmp_path):
    """At most `max_samples` of a source, without those held out, each in a row of its own."""
    files = [tmp_path / name for name in ("few.jsonl", "many.jsonl")]
    for file, count in zip(files, (10, 300), strict=True):
        file.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(count)))
    datasets = [{"path": str(file), "type": "chat", "max_samples": 24} for file in files]
    row = {"sample_packing_sequence_len": 4096, "sample_packing_group_size": 1}
    data = {"datasets": datasets, "val_set_size": 4, "sample_packing_method": "multipack", **row}
    config = small_run(tmp_path, data=data, train={"num_train_epochs": 1})
    estimated = penstock("plan", config, "--json").last["costs"]["length"]
    assert penstock("pack", config).code == 0
    counted = penstock("plan", config, "--json").last["costs"]["length"]
    assert counted["steps"] == 10 + 24 - 4
    assert abs(estimated["steps"] - counted["steps"]) <= 1
