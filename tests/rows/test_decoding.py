from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.core.files import read_json, write_json
from penstock.rows.byte_vocabulary import byte_library_tokenizer
from penstock.rows.decoding import Decoder, load_decoder
from penstock.rows.tokenizer import byte_tokenizer

CORPUS = ["Straße, naïve façade: 東京 🙂🙃 and so on, and so on.", "one two  three\n\tfour"] * 20


def of_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


VOCABULARIES = {"bytes": byte_library_tokenizer(), "merges": of_bytes(), "words": of_words()}


@pytest.mark.parametrize("name", VOCABULARIES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_runs_of_tokens_read_together_as_the_text_they_are_of(name, data):
    tokenizer = VOCABULARIES[name]
    words = st.sampled_from([*"ßï東🙂🙃", "and so on", "  ", "\n", "naïve", "�", "x", "été"])
    text = "".join(data.draw(st.lists(words, max_size=40)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cuts = data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=6))
    ends = [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    decoder = Decoder(tokenizer)
    pieces = list(decoder.pieces(ids, ends))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    if name == "bytes" and "�" not in text:
        last_byte = list(accumulate(len(character.encode()) for character in text))
        assert pieces == [
            "".join(c for c, last in zip(text, last_byte, strict=True) if start < last <= end)
            for start, end in pairwise([0, *ends])
        ]


def test_an_id_of_no_token_is_seen_and_stands_out():
    decoder = Decoder(byte_library_tokenizer())
    assert decoder.text([104, 105, 700, 258]) == "hi<unknown 700><|im_end|>"
    assert [decoder.is_special(token) for token in (104, 700, 258)] == [False, True, True]


def saved(folder: Path) -> Any:
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_folder_reads_as_transformers_reads_it(tmp_path):
    theirs = saved(tmp_path)
    ids = theirs("née <|im_end|>\n 🙂")["input_ids"]
    assert load_decoder(str(tmp_path), tmp_path).text(ids) == theirs.decode(ids)


def test_tokens_that_only_transformers_knows_of_are_read_by_it(tmp_path):
    backend = byte_library_tokenizer()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    more = read_json(settings_file)
    added = {"content": "<think>", "special": True, "lstrip": False, "rstrip": False}
    more["added_tokens_decoder"] = {"259": {**added, "normalized": False, "single_word": False}}
    write_json(settings_file, more)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert load_decoder(str(tmp_path), tmp_path).text([104, 259]) == theirs.decode([104, 259])


def test_bytes_are_spelled_as_transformers_spells_them():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled = byte_library_tokenizer().get_vocab()
    assert {byte: c for c, byte in spelled.items() if byte < 256} == bytes_to_unicode()
