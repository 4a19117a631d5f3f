"""What people get wrong in configurations: each is told in words they can act on."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import penstock, small_run, told


def train(**settings: Any) -> dict[str, Any]:
    return {"train": settings}


def model(**settings: Any) -> dict[str, Any]:
    return {"model": {"config_path": "builtin:tiny-qwen3", **settings}}


def lora(**settings: Any) -> dict[str, Any]:
    return {"lora": {"enable_lora": True, **settings}}


SETTINGS = {
    "a misspelt setting": (
        train(gradient_acumulation=1),
        "did you mean gradient_accumulation_steps?",
    ),
    "a misspelt word of other tools": (train(lerning_rate=1), "did you mean lr?"),
    "a misspelt section": ({"trian": {"lr": 1}}, "did you mean train?"),
    "a word for a number": (train(lr="fast"), "wanted a number"),
    "a negative rate": (train(lr=-1e-4), "it must be at least 0"),
    "yes for true": (train(enable_mixed_precision="yes"), "write true"),
    "no epochs": (train(num_train_epochs=0), "write a number above 0"),
    "no rows in a batch": (train(micro_batch_size=0), "it must be at least 1"),
    "a misspelt optimizer": (train(optimizer="adamv"), "did you mean adamw?"),
    "a misspelt schedule": (train(lr_decay_style="cosin"), "did you mean cosine?"),
    "a precision of other tools": (train(precision="float16"), "fp16_mixed"),
    "two warmups": (train(lr_warmup_steps=5, lr_warmup_ratio=0.1), "leave one of the two out"),
    "a path for a list": ({"data": {"datasets": "rows.jsonl"}}, "wanted a list of mappings"),
    "a mapping for a list": ({"data": {"datasets": {"path": "x"}}}, "wanted a list of mappings"),
    "a share above one": ({"data": {"val_set_size": 1.5}}, "a fraction between 0 and 1"),
    "a unit in a number": ({"data": {"sample_packing_sequence_len": "4k"}}, "whole number"),
    "a word for a rank": (lora(lora_rank="big"), "wanted a whole number"),
    "a layer that is not there": (lora(lora_target_modules=["q_prj"]), "did you mean q_proj?"),
    "more ranks than one": (train(tensor_parallel_size=2), "launch.nproc_per_node: 2"),
    "no such model": (model(model_path="./modle"), "./modle does not exist"),
    "a file for a model": (model(model_path="rows.jsonl"), "Give its folder"),
    "no such tokenizer": (model(tokenizer_path="./no"), "./no does not exist"),
    "a variable that is not set": (
        train(output_dir="${NOT_SET_ANYWHERE}/x"),
        "${NOT_SET_ANYWHERE:-",
    ),
    "a secret in a path": (train(output_dir="${HF_TOKEN}/x"), "looks like a secret"),
    "a file for a folder": (train(output_dir="rows.jsonl"), "is a file"),
    "a folder nobody writes to": (train(output_dir="/proc/ro/x"), "nothing can be made in /proc"),
    "a misspelt stage": ({"pipeline": {"stages": ["prepare", "trian"]}}, "did you mean train?"),
    "a misspelt file": (
        {"data": {"datasets": [{"path": "rows.jsnl"}]}},
        "did you mean rows.jsonl?",
    ),
    "a column of another type": (
        {"data": {"datasets": [{"path": "rows.jsonl", "type": "text", "field_output": "x"}]}},
        "type: text does not read it",
    ),
    "paths for mappings": ({"data": {"datasets": ["rows.jsonl"]}}, "{path: data/train.jsonl}"),
    "no data": ({"data": {"datasets": []}}, "write at least one"),
    "data without a path": ({"data": {"datasets": [{"type": "text"}]}}, "path: required"),
    "a model left empty": (model(config_path=None), "is not set; write model_path"),
    "a model without weights": (
        model(model_path="builtin:tiny-qwen3"),
        "which has no weights; write it as config_path",
    ),
    "a fraction of a row": (train(micro_batch_size=1.5), "wanted a whole number"),
    "minus one for never": (train(save_steps=-1), "it must be at least 0"),
    "minus one for no limit": (train(max_steps=-1), "it must be at least 1"),
    "a number in quotes": (train(num_train_epochs="3"), "write 3 without quotes"),
    "a number with a comma": (train(lr="1,000"), "wanted a number"),
    "a percentage for a share": (train(lr_warmup_ratio=10), "it must be at most 1"),
    "true for a mapping": (train(save_best=True), "{metric: name}"),
    "half-precision of others": (train(precision="fp16"), "did you mean fp16_mixed?"),
    "DPO for an objective": (train(objective="dpo"), "did you mean preference?"),
    "a stage of other tools": ({"pipeline": {"stages": ["sft"]}}, "write train, and set"),
    "a stage for a list": ({"pipeline": {"stages": "train"}}, "write [train]"),
    "an optimizer in 8 bits": (train(optimizer="paged_adamw_8bit"), "write adamw, "),
    "a schedule of other tools": (train(lr_decay_style="cosine_with_restarts"), "mean cosine?"),
    "one beta": (train(optimizer_kwargs={"betas": 0.9}), "two numbers from 0 to below 1"),
    "muon's rate for another": (train(muon_lr=0.05), "is used by muon only"),
    "a decay that rises": (
        train(lr=1e-5, lr_min=1e-4, lr_decay_style="cosine"),
        "write an lr_min of at most",
    ),
    "a batch of odd parts": (train(global_batch_size=3, micro_batch_size=2), "a multiple of 2"),
    "evaluation of nothing": (train(eval_steps=10), "there is nothing to evaluate on"),
    "patience without evaluations": (
        {"data": {"val_set_size": 0.1}, **train(early_stopping={"patience": 3})},
        "write train.eval_steps or train.eval_epochs",
    ),
    "only evaluation of nothing": (train(eval_only=True), "there is nothing to evaluate on"),
    "pairs without pairs": (train(objective="preference"), "write type: preference"),
    "deepspeed": (train(deepspeed="ds.json"), "did you mean data_parallel_mode?"),
    "a rank by its letter": (lora(r=8), "did you mean lora_rank?"),
    "modules of PEFT": (lora(target_modules=["q_proj"]), "did you mean lora_target_modules?"),
    "commas for a list": (lora(lora_target_modules="q_proj,v_proj"), "write a list of texts"),
    "a regular expression": (lora(lora_target_modules=[".*proj"]), "names no linear layer"),
    "no layers": (lora(lora_target_modules=[]), "write at least one"),
    "a rank of nothing": (lora(lora_rank=0), "it must be at least 1"),
    "a rank above all widths": (lora(lora_rank=100000), "Write a smaller rank, such as 16"),
    "an alpha of nothing": (lora(lora_alpha=0), "it must be at least 1"),
    "a percentage for dropout": (lora(lora_dropout=5), "it must be less than 1"),
    "DoRA without adapters": ({"lora": {"use_dora": True}}, "there are no adapters"),
    "an adapter that is none": (lora(init_adapter_path="."), "has no adapter_config.json"),
    "a checkpoint that is none": (train(load_checkpoint_path="./no"), "no is not a complete"),
    "weights that are none": (train(init_checkpoint_path="."), "neither config.json nor"),
    "attention by half its name": (model(attn_implementation="flash"), "mean flash_attention_2?"),
    "attention of GPUs": (model(attn_implementation="flash_attention_2"), "needs a CUDA device"),
    "a template that is not there": ({"data": {"chat_template": "my.jinja"}}, "no file my.jinja"),
    "a template that is none": ({"data": {"chat_template": "chatlm"}}, "did you mean 'chatml'?"),
    "a rendering by its old name": (
        {"data": {"chat_template": "training"}},
        "write that instead, and chat_template",
    ),
    "a model of another name": (model(config_path="builtin:tiny-qwn3"), "is not a built-in model"),
    "weights in a file": (model(model_path="run.yaml"), "Give its folder"),
    "a package that is missing": (train(use_trackio=True), "pip install 'penstock["),
    "no processes": ({"launch": {"nproc_per_node": 0}}, "it must be at least 1"),
    "all GPUs of torchrun": ({"launch": {"nproc_per_node": "gpu"}}, "did you mean auto?"),
    "machines that cannot meet": ({"launch": {"nnodes": 2}}, "write rdzv_endpoint: HOST:29500"),
    "a machine too many": (
        {"launch": {"nnodes": 2, "node_rank": 3, "rdzv_endpoint": "a:1"}},
        "3 is not a rank of 2 node(s)",
    ),
    "a port of its own": ({"launch": {"master_port": 1}}, "did you mean rdzv_endpoint?"),
    "heads that cannot be shared": (train(tensor_parallel_size=3), "num_attention_heads is 4"),
    "a push without a target": (
        {"pipeline": {"stages": ["prepare", "pack", "train", "export", "push"]}},
        "write push.repo_id",
    ),
    "a repository with a space": ({"push": {"repo_id": "my model"}}, "your-name/my-model"),
    "a push without a network": ({"push": {"repo_id": "me/x"}}, "needs the Hugging Face hub"),
    "the folder one is in": (train(output_dir="."), "write a folder of its own"),
    "the folder above": (train(output_dir="../"), "write a folder of its own"),
    "the data's folder": (
        {"data": {"datasets": [{"path": "dta"}]}, **train(output_dir="./dta/")},
        "is data.datasets.0.path too",
    ),
    "prepared data in a file": ({"data": {"dataset_prepared_path": "rows.jsonl"}}, "is a file"),
    "results among processes": ({"pipeline": {"artifacts_path": "/proc/x"}}, "cannot be written"),
    "a misspelt folder": ({"data": {"datasets": [{"path": "dta/"}]}}, "dta/ does not exist"),
}

FILES = {
    "tabs": ("model:\n\tconfig_path: x\n", "tabs are not allowed here"),
    "a key twice": ("model: {config_path: x}\nmodel: {config_path: y}\n", "first in line 1"),
    "a list": ("- model\n- data\n", "write names with a colon"),
    "nothing": ("", "the file is empty"),
    "another tool's file": ("services:\n  web: {image: x}\n", "services: unknown section"),
    "no sections": (
        "config_path: x\nlr: 1\noutput_dir: o\ndatasets: [{path: x}]\n",
        "did you mean train.lr? It belongs in train:",
    ),
    "a server's words": ("model_path: x\nlr: 1\noutput_dir: o\n", "penstock serve run.yaml"),
    "a server's section": ("server: {model_path: x}\n", "a section of the files of penstock serve"),
    "a section in one word": ("model: Qwen/Qwen3-8B\n", "{model_path: Qwen/Qwen3-8B}"),
    "an open bracket": ("model: [unclosed\n", "not valid YAML"),
}

WORDS = {
    "a number that is none": (["--train.lr", ".nan"], "write a finite number"),
    "infinity": (["--train.lr", ".inf"], "write a finite number"),
    "no value": (["--train.lr"], "--train.lr VALUE"),
    "an entry without its number": (["--data.datasets.path", "x"], "data.datasets.0.path"),
    "a misspelt section": (["--trian.lr", "1"], "did you mean train?"),
    "a setting without its section": (["--epochs", "3"], "--train.num_train_epochs"),
    "one dash": (["-train.lr", "1"], "settings have two dashes; write --train.lr"),
    "a setting without dashes": (["train.lr=1e-5"], "write --train.lr=1e-5"),
    "nothing after =": (["--train.lr="], "is empty; wanted a number"),
    "a stage of other tools": (["--stage", "sft"], "did you mean --pipeline.stages?"),
    "--lr": (["--lr", "1e-5"], "did you mean --train.lr?"),
    "--config": (["--config", "run.yaml"], "give the file without an option"),
    "a list without its number": (["--data.datasets.3.path", "x"], "so the next is"),
    "two files": (["other.yaml"], "unexpected extra argument"),
}

NOTICES = {
    "adapters that are not on": ({"lora": {"lora_rank": 8}}, "all weights are trained"),
    "a rate of nothing": (train(lr=0), "nothing is trained"),
    "a rate of 5": (train(lr=5), "check its decimal places"),
    "a lowest rate of no decay": (train(lr_min=1e-6), "does not decay to it"),
    "evaluation of what is trained": (
        {"data": {"test_datasets": [{"path": "rows.jsonl", "type": "text"}]}},
        "rows.jsonl is trained on too",
    ),
    "a target and no push": (
        {"push": {"repo_id": "me/x"}, "pipeline": {"stages": ["prepare", "pack"]}},
        "nothing is uploaded",
    ),
    "muon of adapters": ({**train(optimizer="muon"), **lora()}, "AdamW trains the adapters"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_wrong_setting_is_told_before_any_work(mistake, tmp_path):
    sections, expected = SETTINGS[mistake]
    said = penstock("check", small_run(tmp_path, **sections))
    told(said.code, said.err, expected)


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_that_is_no_configuration_is_told_with_its_line(mistake, tmp_path):
    text, expected = FILES[mistake]
    (tmp_path / "run.yaml").write_text(text)
    said = penstock("check", "run.yaml")
    told(said.code, said.err, expected)


@pytest.mark.parametrize("mistake", WORDS)
def test_a_wrong_word_on_the_command_line_is_told(mistake, tmp_path):
    words, expected = WORDS[mistake]
    said = penstock("check", small_run(tmp_path), *words)
    told(said.code, said.err, expected)


@pytest.mark.parametrize("mistake", NOTICES)
def test_a_setting_that_is_likely_not_meant_is_told_and_does_not_stop(mistake, tmp_path):
    sections, expected = NOTICES[mistake]
    if "data" in sections:
        sections = {
            "data": {"datasets": [{"path": "rows.jsonl", "type": "text"}]} | sections["data"]
        }
    said = penstock("check", small_run(tmp_path, **sections))
    assert said.code == 0, said.err
    assert expected in said.err
