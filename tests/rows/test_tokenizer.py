import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.core.cache.record import digest_json
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.sources.pin import BUILTIN_TOKENIZER_VERSION
from penstock.rows.byte_vocabulary import BYTES_VOCAB_SIZE
from penstock.rows.tokenizer import byte_tokenizer, load_tokenizer

TOKENIZER: Any = byte_tokenizer()
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "été?"},
    {"role": "assistant", "content": "oui"},
]


# Marks of the format, as `<|im_end|>`, are tokens of their own.
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))
def test_a_token_is_a_byte_and_text_comes_back_exactly(text):
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_the_template_is_chatml_and_marks_what_the_assistant_says():
    text = TOKENIZER.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    encoded = TOKENIZER.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    said = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert TOKENIZER.decode(said) == "4<|im_end|>oui<|im_end|>"


def test_a_saved_tokenizer_loads_as_the_same_in_transformers(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded("née <|im_end|>\n")["input_ids"] == TOKENIZER("née <|im_end|>\n")["input_ids"]
        assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
        assert loaded.chat_template == TOKENIZER.chat_template
        assert len(loaded) == BYTES_VOCAB_SIZE


def test_changing_the_built_in_tokenizer_raises_its_version():
    vocabulary = sorted(TOKENIZER.get_vocab().items())
    assert (BUILTIN_TOKENIZER_VERSION, digest_json([vocabulary, TOKENIZER.chat_template])[:16]) == (
        1,
        "6d9059acd2001782",
    )


def test_a_folder_that_is_no_tokenizer_is_a_config_error_and_an_absent_one_needs_the_hub(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(CapabilityError, match="org/unseen"):
        load_tokenizer("org/unseen")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_eos_token_that_is_not_in_the_vocabulary_is_refused_with_the_nearest_one(tmp_path, file):
    """transformers would add it, with an id that the model has no row for."""
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    for name, says in (("<|im_ends|>", "did you mean '<|im_end|>'?"), ("☃", "vocabulary.")):
        if file == path.name:
            path.write_text(json.dumps({**config, "eos_token": name}))
        else:
            path.write_text(json.dumps(config))
            (tmp_path / file).write_text(json.dumps({"eos_token": name}))
        assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == len(byte_tokenizer())
        with pytest.raises(ConfigError, match="which is not in its vocabulary") as refusal:
            load_tokenizer(str(tmp_path))
        assert says in str(refusal.value)


def test_an_eos_token_of_the_vocabulary_is_taken_however_it_is_written(tmp_path):
    for name in ("☃ end", '"quoted"', "<|im_end|>"):
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"eos_token": name})
        tokenizer.save_pretrained(tmp_path / name)
        assert load_tokenizer(str(tmp_path / name)).eos_token == name
