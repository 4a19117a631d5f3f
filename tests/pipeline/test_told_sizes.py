"""Sizes that do not suit each other are told in the plan, at training's start and in its report."""

import html
import json
from typing import Any

import pytest

from tests.cli.command import penstock, small_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "rows that fill no step": (
        {"sample_packing_sequence_len": 64, "dataloader_drop_last": True},
        {},
        {"global_batch_size": 4, "num_train_epochs": 3, "lr_warmup_steps": 50},
        {
            "few_steps": "lower train.global_batch_size",
            "rows_dropped": "data.dataloader_drop_last: false",
            "long_warmup": "lower train.lr_warmup_steps",
        },
    ),
    "a step of more rows than there are": (
        {"sample_packing_sequence_len": 64, "truncation_mode": "drop"},
        {"max_seq_len": 64},
        {"global_batch_size": 64},
        {
            "few_steps": "lower train.global_batch_size",
            "batch_over_epoch": "lower train.global_batch_size",
            "samples_too_long": "data.truncation_mode: keep_start",
        },
    ),
    "rows of nothing but room": (
        {"sample_packing_sequence_len": 4096},
        {"max_seq_len": 16},
        {"num_train_epochs": 25},
        {
            "long_rows": "lower data.sample_packing_sequence_len",
            "samples_cut": "data.datasets.*.max_seq_len; raise it",
        },
    ),
}
"""Settings of data, of its one source and of training; what is found, and what is to be changed."""


@pytest.mark.parametrize(
    "name",
    [
        name
        if name == "a step of more rows than there are"
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in RUNS
    ],
)
def test_what_does_not_suit_is_told_everywhere_with_the_setting_to_change(name, tmp_path):
    data, source, train, expected = RUNS[name]
    lengths = [25, 25, 25, 25, 25, 25, 60 if "truncation_mode" in data else 25]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "w " * length}) + "\n" for length in lengths))
    entry = {"path": str(texts), "type": "text", **source}
    config = small_run(tmp_path, data={**data, "datasets": [entry]}, train=train)
    run = penstock("run", config, "--json")
    assert run.code == 0, run.err
    told = run.err[run.err.index("train: warning:") :]
    [warnings] = [
        stage["facts"]["warnings"] for stage in run.last["stages"] if stage["stage"] == "train"
    ]
    planned = penstock("plan", config, "--json").last["sizing"]
    report = html.unescape((tmp_path / "out" / "report.html").read_text())
    assert [each["name"] for each in warnings] == list(expected)
    assert planned["warnings"] == warnings
    assert planned["known"] == "counted"
    for warning in warnings:
        assert expected[warning["name"]] in warning["text"]
        assert warning["text"] in told
        assert warning["text"] in report
