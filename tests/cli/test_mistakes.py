"""What people get wrong in configurations and data: each is told in words they can act on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import penstock, small_run

ROLES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = json.dumps({"messages": ROLES}) + "\n"


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
    "a share above one": ({"data": {"val_set_size": 1.5}}, "a share between 0 and 1"),
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
    "a misspelt folder": ({"data": {"datasets": [{"path": "dta/"}]}}, "dta/ does not exist"),
}

FILES = {
    "tabs": ("model:\n\tconfig_path: x\n", "a tab stands where only spaces may"),
    "a key twice": ("model: {config_path: x}\nmodel: {config_path: y}\n", "first in line 1"),
    "a list": ("- model\n- data\n", "write names with a colon"),
    "nothing": ("", "the file is empty"),
    "an open bracket": ("model: [unclosed\n", "not valid YAML"),
}

WORDS = {
    "a number that is none": (["--train.lr", ".nan"], "write a finite number"),
    "infinity": (["--train.lr", ".inf"], "write a finite number"),
    "no value": (["--train.lr"], "--train.lr VALUE"),
    "an entry without its number": (["--data.datasets.path", "x"], "data.datasets.0.path"),
    "a misspelt section": (["--trian.lr", "1"], "did you mean train?"),
    "a setting without its section": (["--epochs", "3"], "--train.num_train_epochs"),
    "two files": (["other.yaml"], "unexpected extra argument"),
}

DATA: dict[str, tuple[str | bytes, str, dict[str, Any], str]] = {
    "an empty file": ("", "d.jsonl", {}, "d.jsonl is empty"),
    "a broken line": (5 * CHAT + "{oops\n", "d.jsonl", {}, "d.jsonl:6: not JSON"),
    "a comma too many": ('{"text": "a",}\n', "d.jsonl", {}, "take it out"),
    "UTF-16": (CHAT.encode("utf-16"), "d.jsonl", {}, "iconv -f UTF-16"),
    "Latin-1": ('{"text": "é"}\n'.encode("latin-1"), "d.jsonl", {"type": "text"}, "not UTF-8"),
    "no answers": (
        '{"messages": [{"role": "user", "content": "a"}]}\n',
        "d.jsonl",
        {},
        "nothing in it is the assistant's",
    ),
    "a misspelt role": (CHAT.replace("assis", "asis"), "d.jsonl", {}, "did you mean 'assistant'?"),
    "another type": (CHAT, "d.jsonl", {"type": "instruction"}, "They look like type: chat"),
    "a type that is none": (CHAT, "d.jsonl", {"type": "chatt"}, "did you mean chat?"),
    "a misspelt column": ('{"txt": "a"}\n', "d.jsonl", {"type": "text"}, "did you mean 'txt'?"),
    "numbers for text": ('{"text": 5}\n', "d.jsonl", {"type": "text"}, "text is a number"),
    "two kinds of records": (CHAT + '{"text": "x"}\n', "d.jsonl", {}, "its records fit 2 types"),
    "one bad record of many": ('[{"text": "a"}, {"tex": "b"}]', "d.json", {}, "record 2"),
    "an archive": ("PK", "d.zip", {}, "is an archive, which is not read"),
    "a cut archive": (b"\x1f\x8bjunk", "d.jsonl.gz", {}, "cannot be decompressed as gzip"),
    "a cut table": (b"PAR1junkPAR1", "d.parquet", {"type": "text"}, "cannot be read as parquet"),
    "pairs that are none": (CHAT, "d.jsonl", {"type": "preference"}, "train.objective: preference"),
}


def told(code: int, text: str, expected: str) -> None:
    assert code in (1, 2, 3), text
    assert expected in text
    assert "Traceback" not in text


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


@pytest.mark.parametrize("mistake", DATA)
def test_data_that_cannot_be_read_is_told_with_its_place(mistake, tmp_path):
    content, name, settings, expected = DATA[mistake]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    sections = {"data": {"datasets": [{"path": name, **settings}]}}
    said = penstock("prepare", small_run(tmp_path, **sections))
    told(said.code, said.err, expected)
    assert not list(tmp_path.rglob("MANIFEST.json"))
