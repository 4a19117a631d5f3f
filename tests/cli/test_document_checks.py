"""`check` and `plan` over the files that documents of other tools print: the same answer of both,
and where something is missing here, what to write instead."""

import json
from copy import deepcopy
from typing import Any

import pytest
import yaml

from penstock.config.loading import yaml12
from penstock.config.translate.translation import put_at
from tests.cli.command import penstock
from tests.config.dialects import document_examples as said
from tests.config.dialects.test_document_examples import ERNIEKIT_CONTEXTS, NXDT_FILES

MODEL = "builtin:tiny-qwen3"
ANSWERED = {"src": ["1 + 1?"], "tgt": ["2"]}
PAIR = {"src": ["1 + 1?"], "tgt": [], "response": [["2"], ["3"]], "sort": [1, 0]}
TOKENS = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
ASKED = {"input": "1 + 1?", "output": "2"}
COMPARED = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}

NEEDS = {
    "a whole run": "needs a CUDA device",
    "full sharding": "Or write launch.nproc_per_node: 8",
    "hybrid sharding": "and 1 process is to be shared out",
    "logging": "pip install 'penstock[wandb]'",
    "offloading": "there is no CUDA device",
}
"""Examples that ask for more than this machine has, and what is said of it."""


def local(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A printed block as a whole file, and a record of its data."""
    values: dict[str, Any] = {
        "model": {"config_path": MODEL},
        "data": {"datasets": [{"path": "data.jsonl", "type": "tokenized"}]},
        "train": {"output_dir": "out"},
    }
    for section, fields in yaml12.parse(said.LOCAL[name]).value.items():
        values[section] = {**values.get(section, {}), **fields}
    values["model"].pop("model_path", None)
    values["model"]["config_path"] = MODEL
    for entry in values["data"]["datasets"]:
        entry["path"] = "data.jsonl"
    return values, TOKENS


def of_erniekit(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = ERNIEKIT_CONTEXTS[name]
    paths = {"train_dataset_path": "data.jsonl", "eval_dataset_path": "data.jsonl"}
    if "," in keys.get("train_dataset_path", ""):
        paths["train_dataset_path"] = "data.jsonl,more.jsonl"
    values = said.ERNIEKIT_REQUIRED | keys | {"model_name_or_path": MODEL, "output_dir": "out"}
    return values | {name: path for name, path in paths.items() if name in values}, (
        PAIR if values["stage"] == "DPO" else ANSWERED
    )


def of_nxdt(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    values = deepcopy(NXDT_FILES[name])
    put_at(values, "data.tokenizer.type", MODEL)
    put_at(values, "data.train_dir", "data.jsonl")
    return values, COMPARED if name == "dpo" else ASKED


EXAMPLES = {
    **{f"local: {name}": (local, name) for name in said.LOCAL},
    **{f"erniekit: {name}": (of_erniekit, name) for name in ERNIEKIT_CONTEXTS},
    **{f"nxdt: {name}": (of_nxdt, name) for name in NXDT_FILES if name != "megatron"},
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_checks_and_plans_of_printed_files_say_the_same(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, name = EXAMPLES[example]
    values, record = make(name)
    for file in ("data.jsonl", "more.jsonl"):
        (tmp_path / file).write_text((json.dumps(record) + "\n") * 20)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    check, plan = penstock("check", "run.yaml"), penstock("plan", "run.yaml")
    assert "Traceback" not in check.err + plan.err
    assert "bug in Penstock" not in check.err + plan.err
    if make is of_nxdt:  # names a model and 32 processors that are not here
        assert check.code in (2, 3)
        assert plan.code in (2, 3)
        assert "\n  " in check.err
        return
    expected = NEEDS.get(name, "")
    assert check.code == plan.code == (0 if not expected else check.code), check.err
    assert expected in check.err
    assert expected in plan.err


TRAINING = {"learning_rate": 1e-5, "output_dir": "out", "per_device_train_batch_size": 1}
TRL = {"model_name_or_path": "/no/model", "dataset_name": "data.jsonl", **TRAINING}
AXOLOTL = {"base_model": "/no/mixtral", "output_dir": "out", "learning_rate": 1e-5}
FOREIGN = {
    "orpo": {**TRL, "beta": 0.1, "max_prompt_length": 64, "loss_type": "orpo"},
    "lora": {**TRL, "use_peft": True, "lora_r": 8},
    "mixtral": {
        **AXOLOTL,
        "datasets": [{"path": "data.jsonl", "type": "chat_template"}],
        "micro_batch_size": 1,
        "num_epochs": 1,
        "sequence_len": 512,
    },
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(("has_data", "code"), [(True, 0), (False, 2)])
def test_a_model_of_another_machine_is_left_unjudged_whatever_the_file(
    name, has_data, code, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    roles = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = COMPARED if name == "orpo" else {"messages": roles}
    if has_data:
        (tmp_path / "data.jsonl").write_text((json.dumps(record) + "\n") * 20)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FOREIGN[name]))
    said = penstock("check", "run.yaml")
    assert said.code == code, said.err
    assert "not checked against the model: /no/" in said.err
    assert ("data.jsonl does not exist" in said.err) is not has_data
