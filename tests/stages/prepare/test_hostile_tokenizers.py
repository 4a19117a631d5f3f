"""Tokenizers and chat templates from elsewhere are tried in a process with limits."""

import json
import time
from contextlib import suppress

import pytest

from penstock.config.schema.data import DataConfig
from penstock.core.errors import ConfigError, StageError
from penstock.prepare.chat_templates.resolve import resolve_chat_template
from penstock.prepare.encode.backends import BackendMismatch, TextEncoder
from penstock.rows.probe import MAX_TEMPLATE
from penstock.rows.tokenizer import load_tokenizer

LETTERS = {chr(code): code - 32 for code in range(32, 127)}
BPE = {"type": "BPE", "vocab": LETTERS, "merges": []}
UNKNOWN = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 9,
    "vocab": {"a": 0},
}


def pattern(kind, regex, **more):
    return {"type": kind, "pattern": {"Regex": regex}, **more}


def split(regex):
    return {"pre_tokenizer": pattern("Split", regex, behavior="Isolated", invert=False)}


TEN_TIMES = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def write_tokenizer(folder, parts, template=None):
    folder.mkdir(exist_ok=True)
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    empty |= {"added_tokens": [], "post_processor": None, "decoder": None}
    content = {"version": "1.0", **empty, "model": BPE, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "parts",
    [
        split(r"(a+)+$|(a|aa)+$"),
        {"normalizer": pattern("Replace", r"(a+)+$", content="")},
        {"normalizer": {"type": "Sequence", "normalizers": [TEN_TIMES] * 12}},
    ],
    ids=["retries", "replaced", "multiplied"],
)
def test_a_tokenizer_that_does_not_end_is_refused_by_its_folder(tmp_path, parts):
    folder = write_tokenizer(tmp_path / "model", parts)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=rf"{folder} cannot encode a text of 2,000"):
        load_tokenizer(folder)
    assert time.monotonic() - start < 30


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error_with_its_folder(tmp_path):
    folder = write_tokenizer(tmp_path / "unknown", {"model": UNKNOWN})
    with pytest.raises(StageError, match=rf"{folder} cannot encode a text: WordPiece error"):
        TextEncoder(load_tokenizer(folder))
    folder = write_tokenizer(tmp_path / "panic", split(r"(z+)+$"))
    encoder = TextEncoder(load_tokenizer(folder))
    hard = ["z" * 3000 + "!"]
    with suppress(BackendMismatch):  # fastokens, if it is installed, gives up first
        encoder.encode(["a"])
        if not encoder.fallback_reason:
            encoder.encode(hard)
    with pytest.raises(StageError, match=rf"{folder} cannot encode a text: .*retry-limit"):
        encoder.encode(hard)


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "multiplies": "{% set a = 'a' * 99999 %}{{ a * 99999999 }}",
    "adds": "{% set n = namespace(a='aaaaaaaaaa') %}"
    "{% for _ in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "powers": "{{ 9 ** 99999999 }}",
    "pads": "{{ '' | center(99999999999) }}",
    "long": "a{# #}" * (MAX_TEMPLATE // 6 + 1),
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


SLOW = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=SLOW) if what in ("loops", "powers") else what for what in TEMPLATES],
)
def test_a_template_that_does_not_end_is_refused_by_its_file(tmp_path, what):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATES[what])
    with pytest.raises(ConfigError, match=r"The chat template cannot be (used|read): .*chat.jinja"):
        resolve_chat_template(
            DataConfig.model_validate({"chat_template": str(path), "datasets": [{"path": "dummy"}]})
        )


@pytest.mark.parametrize("what", ["multiplies", "long"])
def test_a_template_of_a_tokenizer_that_does_not_end_is_refused_by_its_folder(tmp_path, what):
    folder = write_tokenizer(tmp_path / "model", {}, TEMPLATES[what])
    with pytest.raises(ConfigError, match=rf"{folder}"):
        load_tokenizer(folder)


def test_a_template_may_not_leave_the_sandbox(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}")
    folder = write_tokenizer(tmp_path / "model", {}, path.read_text())
    tokenizer = load_tokenizer(folder)
    with pytest.raises(Exception, match=r"unsafe|undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
