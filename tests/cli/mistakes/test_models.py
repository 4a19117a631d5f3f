"""Folders that are no models, or not whole ones: told before any work, by checks and by runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.rows.tokenizer import byte_tokenizer
from tests.cli.command import penstock, small_run, told

WEIGHTS = "model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny Llama in one file, in several, and with a vocabulary of fewer tokens."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes))
    whole.save_pretrained(root / "whole")
    whole.save_pretrained(root / "sharded", max_shard_size="30KB")
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).save_pretrained(root / "narrow")
    for folder in root.iterdir():
        byte_tokenizer().save_pretrained(folder)
    return root


def remove(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for file in list(folder.glob(pattern)):
            file.unlink()

    return change


def rename(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).rename(folder / name)  # pyright: ignore[reportReturnType]


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)  # pyright: ignore[reportReturnType]


def say(**entries: Any) -> Callable[[Path], None]:
    """Change entries of config.json; None takes one out."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        values = {**json.loads(file.read_text()), **entries}
        file.write_text(json.dumps({n: v for n, v in values.items() if v is not None}))

    return change


def cut(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / WEIGHTS
        file.write_bytes(file.read_bytes()[:size])

    return change


FOLDERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no config.json": ("whole", remove("config.json"), "holds no config.json"),
    "a broken config.json": ("whole", write("config.json", "{"), "cannot be read as JSON"),
    "a shard is missing": ("sharded", remove("*2-of*"), "model-00002-of-00005.safetensors is not"),
    "the index is missing": ("sharded", remove("*.index.json"), "no index of shards"),
    "the weights are missing": ("whole", remove(WEIGHTS), "holds no model.safetensors"),
    "pickled weights": ("whole", rename("pytorch_model.bin"), "save them as safetensors"),
    "weights for llama.cpp": ("whole", rename("model.gguf"), "save them as safetensors"),
    "weights cut short": ("whole", cut(5000), "would be bytes"),
    "weights without their end": ("whole", cut(-100), "would be bytes"),
    "a pointer for weights": ("whole", write(WEIGHTS, LFS), "git lfs pull fetches the file"),
    "another architecture": ("whole", say(model_type="bert"), "tokens see the tokens after"),
    "no architecture": ("whole", say(model_type=None), "says model_type None"),
    "no vocabulary size": ("whole", say(vocab_size=None), "has no vocab_size"),
    "wider layers": ("whole", say(hidden_size=64), "the config makes it (320, 64)"),
    "more layers": ("whole", say(num_hidden_layers=4), "lacks 18 tensors"),
    "fewer layers": ("whole", say(num_hidden_layers=1), "the checkpoint has 2 layers"),
    "heads in odd groups": ("whole", say(num_attention_heads=3), "(3) is not a multiple"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(models: Path, name: str, folder: Path, change: Callable[[Path], None]) -> Path:
    """A config of a changed copy of a model."""
    shutil.copytree(models / name, folder / "m")
    change(folder / "m")
    return small_run(folder, model={"config_path": None, "model_path": "m"})


@pytest.mark.parametrize("mistake", FOLDERS)
def test_a_folder_that_is_no_whole_model_is_told_before_any_work(mistake, models, tmp_path):
    name, change, expected = FOLDERS[mistake]
    config = run_of(models, name, tmp_path, change)
    for command in ("check", "plan", "run"):
        said = penstock(command, config)
        told(said.code, said.err, expected)
    assert not (tmp_path / "data").exists()


TOKENIZERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "the tokenizer is missing": ("whole", remove("tokenizer*"), "holds no tokenizer"),
    "the tokenizer is broken": ("whole", write("tokenizer.json", "{"), "cannot be loaded"),
    "another vocabulary": ("narrow", remove("nothing"), "beyond the 100 tokens of the model"),
}


@pytest.mark.parametrize("mistake", TOKENIZERS)
def test_a_tokenizer_that_is_not_the_models_is_told_by_a_check(mistake, models, tmp_path):
    name, change, expected = TOKENIZERS[mistake]
    said = penstock("check", run_of(models, name, tmp_path, change))
    told(said.code, said.err, expected)


def add_token(folder: Path) -> None:
    """Add a token after all of the model's 320, of which the byte tokenizer uses fewer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<new {number}>" for number in range(320 - len(tokenizer))])
    tokenizer.add_tokens(["<|role|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)


def add_token_and_write_it(folder: Path) -> None:
    add_token(folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ '<|role|>' }}" + template.read_text())


@pytest.mark.parametrize("writes", [True, False], ids=["template", "text"])
def test_tokens_beyond_the_models_vocabulary_are_told_by_a_check(writes, models, tmp_path):
    config = run_of(models, "whole", tmp_path, add_token_and_write_it if writes else add_token)
    told_of = "m: its chat template writes <|role|>, beyond the 320 tokens of the model m"
    if not writes:
        assert penstock("check", config).code == 0, "no sample contains the token"
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a <|role|> b"}) + "\n")
        told_of = "rows.jsonl contain '<|role|>', beyond the 320 tokens of the model m"
    said = penstock("check", config)
    told(said.code, said.err, told_of)
    assert "resize_token_embeddings" in said.err


def without_markers(folder: Path) -> None:
    """A base model's tokenizer: no template, and no special token before a role."""
    (folder / "chat_template.jinja").unlink()
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", "<|other|>"))


ASK = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TEMPLATES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str, str]] = {
    "no template": (
        remove("chat_template*"),
        {"messages": [ASK, {"role": "assistant", "content": "b"}]},
        "has no chat template",
        "chatml",
    ),
    "neither template nor markers": (
        without_markers,
        {"messages": [ASK, {"role": "assistant", "content": "b"}]},
        "has no chat template",
        "alpaca",
    ),
    "tools": (
        remove("nothing"),
        {"tools": TOOLS, "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}]},
        "no place for tools",
        "qwen3-instruct",
    ),
    "reasoning": (
        remove("nothing"),
        {"messages": [ASK, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
        "no place for reasoning",
        "qwen3",
    ),
}


@pytest.mark.parametrize("mistake", TEMPLATES)
def test_a_check_names_the_included_template_that_conversations_need(mistake, models, tmp_path):
    change, record, expected, template = TEMPLATES[mistake]
    (tmp_path / "c.jsonl").write_text(json.dumps(record) + "\n")
    config = run_of(models, "whole", tmp_path, change)
    data = ("--data.datasets", "[{path: c.jsonl}]", "--data.sample_packing_sequence_len", "2048")
    said = penstock("check", config, *data)
    told(said.code, said.err, expected)
    assert f"Write data.chat_template: {template}, " in said.err
    assert penstock("check", config, *data, "--data.chat_template", template).code == 0


def test_layers_that_only_predict_further_tokens_may_be_left_out(models, tmp_path):
    """Such as those of GLM, which are numbered after the others."""
    change = say(num_hidden_layers=1, num_nextn_predict_layers=1)
    said = penstock("check", run_of(models, "whole", tmp_path, change))
    assert said.code == 0, said.err


def test_results_do_not_go_where_the_model_is(models, tmp_path):
    config = run_of(models, "whole", tmp_path, remove("nothing"))
    said = penstock("run", config, "--train.output_dir", "./m/")
    told(said.code, said.err, "is model.model_path too")
