"""Tasks of the lm-evaluation-harness, where its package is installed."""

import json
import sys

import pytest
import torch
import yaml

from penstock.core.errors import CapabilityError, ConfigError
from penstock.evaluate import harness
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.evaluate.test_evaluate import random_model

QUESTIONS = [("1+1=", ["2", "3"], 0), ("2+1=", ["2", "3"], 1), ("7-3=", ["4", "1"], 0)]


def test_without_the_package_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda _: None)
    with pytest.raises(CapabilityError, match=r"lm_eval, which is not installed"):
        harness.run_tasks(tmp_path, ["sums"], limit=None, batch_size=1, seed=0)


def test_the_numbers_of_each_task_are_told_with_their_errors():
    told = {
        "sums": {
            "alias": "sums",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "acc_norm,none": 1,
            "acc_norm_stderr,none": "N/A",
        },
        "all": {"alias": "all", " ": " "},
    }
    assert harness.parse_scores(told) == [
        harness.Score("sums", "acc,none", 0.5, 0.1),
        harness.Score("sums", "acc_norm,none", 1.0, None),
    ]


def test_an_adapter_is_loaded_on_the_base_beside_it(tmp_path):
    for base in ("hf", "org/model"):
        folder = tmp_path / base.partition("/")[0] / "adapter"
        folder.mkdir(parents=True)
        named = "../base" if base == "hf" else base
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        (tmp_path / "hf" / "base").mkdir(parents=True, exist_ok=True)
        found = harness.model_arguments(folder)
        wanted = str(folder / named) if base == "hf" else base
        assert (found["pretrained"], found["peft"]) == (wanted, str(folder))
    (tmp_path / "config.json").write_text("{}")
    assert harness.model_arguments(tmp_path)["pretrained"] == str(tmp_path)


@torch.no_grad()
def likelihood(model, text, answer):
    ids = list(f"{text}{answer}".encode())
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(1)
    asked = len(text.encode())
    return sum(logits[at - 1, ids[at]].item() for at in range(asked, len(ids)))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(harness.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_a_task_of_ones_own_scores_what_the_model_finds_likelier(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock"])
    model = random_model()
    model.save_pretrained(tmp_path / "hf")
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    file = tmp_path / "sums.jsonl"
    names = ("question", "choices", "answer")
    file.write_text(
        "".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in QUESTIONS)
    )
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(yaml.safe_dump(task))
    right = [
        likelihood(model, text, choices[answer]) > likelihood(model, text, choices[1 - answer])
        for text, choices, answer in QUESTIONS
    ]
    asked = {"limit": None, "batch_size": 2, "seed": 0, "more_tasks": tmp_path / "tasks"}
    [score] = harness.run_tasks(tmp_path / "hf", ["sums"], **asked)
    assert (score.task, score.metric) == ("sums", "acc,none")
    assert score.value == pytest.approx(sum(right) / len(right))
    with pytest.raises(ConfigError, match="has no task summs"):
        harness.run_tasks(tmp_path / "hf", ["summs"], **asked)
