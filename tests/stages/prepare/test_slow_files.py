"""Tokenizers from the files of slow ones, without a tokenizer.json, by the oracle of drawn
templates."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CapabilityError
from penstock.rows.tokenizer import load_tokenizer
from tests.conftest import ROOT
from tests.stages.prepare.test_drawn_templates import SPECIAL, check, tokenizer_of

CLASSES = {
    "bytes": "Qwen2Tokenizer",
    "wordpiece": "BertTokenizer",
    "prefix": "LlamaTokenizer",
    "no prefix": "GemmaTokenizer",
}


def write_files(folder: Path, kind: str) -> None:
    """The files of a slow tokenizer, whose tokenizer_config.json names its class."""
    special: dict[str, Any] = {"additional_special_tokens": list(SPECIAL)}
    if kind in ("prefix", "no prefix"):
        special |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        write_sentencepiece(folder / "tokenizer.model", adds_prefix=kind == "prefix")
    else:
        model = json.loads(tokenizer_of(kind).backend_tokenizer.to_str())["model"]
        if kind == "bytes":
            merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
            (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
            (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        else:
            names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *model["vocab"]]
            (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    config = {"tokenizer_class": CLASSES[kind], **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentencepiece(path: Path, *, adds_prefix: bool) -> None:
    """A SentencePiece model that falls back to bytes, as Llama 2's and Gemma's."""
    trainer: Any = pytest.importorskip("sentencepiece").SentencePieceTrainer
    with path.open("wb") as sink:
        trainer.train(
            sentence_iterator=iter((ROOT / "README.md").read_text().splitlines()),
            model_writer=sink,
            model_type="bpe",
            vocab_size=600,
            byte_fallback=True,
            character_coverage=0.99,
            add_dummy_prefix=adds_prefix,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            minloglevel=2,
        )


@pytest.mark.parametrize("kind", CLASSES)
def test_tokenizers_from_the_files_of_slow_ones_train_the_same_tokens(kind, tmp_path):
    write_files(tmp_path, kind)
    tokenizer = load_tokenizer(str(tmp_path))
    assert type(tokenizer).__name__ == CLASSES[kind]
    for seed in range(5000, 5030):
        check(seed, tokenizer)


def test_a_tokenizer_in_python_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(CapabilityError, match=r"runs in Python \(ByT5Tokenizer\).*\n.*tokenized"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_sentencepiece_model_without_the_package_names_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CapabilityError, match=r"pip install sentencepiece"):
        load_tokenizer(str(tmp_path))
