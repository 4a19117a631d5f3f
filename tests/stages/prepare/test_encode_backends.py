"""Ids are the tokenizer's own, whichever library encodes, and a library that errs is found out."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from penstock.core.errors import CapabilityError
from penstock.prepare.encode import backends, loss_mask
from penstock.prepare.encode.backends import TextEncoder
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.encoding import SPECIAL, words
from tests.stages.prepared import prepare, run, table_of, texts, write_lines

TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t'é日1"))
    | st.sampled_from([f" {special} x" for special in SPECIAL]),
    max_size=5,
)
KINDS = ["bytes", "nfc", "greedy", "pieces"]
NAMES = ["builtin", *KINDS]


def tokenizer_of(name: str) -> Any:
    return byte_tokenizer() if name == "builtin" else words(None, name)


def trimming() -> TextEncoder:
    """As GPT-2's and Llama 3's tokenizers are, which leave blanks out of the places of tokens."""
    tokenizer = Tokenizer.from_str(words(None).backend_tokenizer.to_str())
    tokenizer.post_processor = ByteLevel(trim_offsets=True)
    return TextEncoder(type(words(None))(tokenizer_object=tokenizer))


TRIMMING = trimming()
ENCODERS = {name: TextEncoder(tokenizer_of(name)) for name in NAMES}


def test_the_fast_library_takes_tokenizers_of_bytes():
    pytest.importorskip("fastokens")
    assert [ENCODERS[name].fallback_reason for name in ("builtin", "bytes", "nfc")] == ["", "", ""]


@settings(deadline=None)
@given(TEXTS, st.sampled_from(NAMES))
def test_ids_are_those_of_transformers(found, name):
    ids, offsets = ENCODERS[name].encode(found)
    mine = [ids[a:b].tolist() for a, b in pairwise(offsets)]
    judge = tokenizer_of(name)(found, add_special_tokens=False)["input_ids"] if found else []
    assert mine == judge


class Wrong:
    """A library that gets one word wrong, as young libraries do."""

    def __init__(self, tokenizer_json, *, splits_special):
        self._right = backends._HFTokenizers(Tokenizer.from_str(tokenizer_json))
        del splits_special

    def encode(self, texts):
        ids, offsets = self._right.encode(texts)
        for index, text in enumerate(texts):
            if "ß" in text:
                ids[offsets[index]] += 1
        return ids, offsets


@pytest.fixture
def _wrong(monkeypatch):
    monkeypatch.setattr(backends, "_Fastokens", Wrong)
    loss_mask.get_loss_masker.cache_clear()
    yield
    loss_mask.get_loss_masker.cache_clear()


@pytest.mark.usefixtures("_wrong")
def test_a_library_found_out_in_the_middle_of_a_slice_has_written_nothing_of_it(tmp_path):
    pytest.importorskip("fastokens")
    records = [*texts(1500), {"text": "Fuß"}, *texts(700)]
    path = write_lines(tmp_path / "a.jsonl", records)
    run(prepare((path, {"type": "text"}), shuffle_merged_datasets=False), tmp_path / "out")
    rows = table_of(tmp_path / "out")["input_ids"].to_pylist()
    end = byte_tokenizer().eos_token_id
    assert rows == [[*record["text"].encode(), end] for record in records]


@pytest.mark.usefixtures("_wrong")
def test_it_is_said_why_the_slow_library_encodes(monkeypatch, caplog):
    encoder = TextEncoder(byte_tokenizer())
    assert encoder.fallback_reason == ""
    with pytest.raises(backends.BackendMismatch):
        encoder.check(["a", "Fuß"], 2)
    assert "differs from tokenizers on 'Fuß'" in encoder.fallback_reason
    encoder.check(["Fuß"], 1)  # the slow one is not checked again
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    caplog.clear()
    assert "is not installed" in TextEncoder(byte_tokenizer()).fallback_reason
    assert not caplog.records  # penstock doctor says it


def test_files_are_the_same_without_the_fast_library(tmp_path, monkeypatch):
    chat = [{"role": "user", "content": "é ß"}, {"role": "assistant", "content": "日 ok"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat}] * 5)
    stage = prepare((path, {"type": "chat"}))
    tables = []
    for name in ("fast", "slow"):
        loss_mask.get_loss_masker.cache_clear()
        run(stage, tmp_path / name / "x")
        tables.append(table_of(tmp_path / name / "x"))
        monkeypatch.setattr(backends, "find_spec", lambda _: None)
    loss_mask.get_loss_masker.cache_clear()
    assert tables[0].equals(tables[1])


def test_a_tokenizer_that_changes_texts_by_itself_is_refused():
    class Lowering(type(byte_tokenizer())):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus([t.lower() for t in text], *args, **kwargs)

    loud: Any = byte_tokenizer()
    loud.__class__ = Lowering
    with pytest.raises(CapabilityError, match="Python code changes texts"):
        TextEncoder(loud)


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_applied():
    short: Any = words(None)
    short = type(short)(tokenizer_object=short.backend_tokenizer)
    short.backend_tokenizer.enable_truncation(3)
    short.backend_tokenizer.enable_padding(length=50)
    text = "not cut after three tokens"
    ids, _ = TextEncoder(short).encode([text])
    assert ids.tolist() == words(None)(text)["input_ids"]
    assert len(ids) > 3


def test_special_tokens_in_texts_are_words_where_the_tokenizer_says_so():
    splitting: Any = type(words(None))(
        tokenizer_object=Tokenizer.from_str(words(None).backend_tokenizer.to_str()),
        split_special_tokens=True,
    )
    text = "a<|im_end|>b"
    ids, _ = TextEncoder(splitting).encode([text])
    assert ids.tolist() == splitting(text)["input_ids"]
    assert ids.tolist() != words(None)(text)["input_ids"]


@settings(deadline=None)
@given(
    st.text(
        st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\u3000'é日1"), min_size=1
    )
)
@example(" ")
def test_the_places_of_tokens_cover_their_text_even_where_blanks_are_trimmed(text):
    ids, starts, ends = TRIMMING.encode_with_offsets(text)
    assert len(ids) == len(starts) == len(ends)
    assert (starts[0], ends[-1]) == (0, len(text))
    assert (starts[1:] <= ends[:-1]).all()


def test_pairs_and_judged_answers_are_written_as_plain_arrow(tmp_path):
    base = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    path = write_lines(tmp_path / "p.jsonl", [base, {**base, "chosen": "no"}, {**base, "x": 1}])
    run(prepare((path, {"type": "preference"})), tmp_path / "pairs")
    table = table_of(tmp_path / "pairs")
    tokenizer: Any = byte_tokenizer()
    for name, answer in (("chosen", "yes"), ("rejected", "no")):
        ids, labels = (table[f"{name}_{part}"][1].as_py() for part in ("input_ids", "labels"))
        assert tokenizer.decode(ids).endswith(f"assistant\n{answer}<|im_end|>\n")
        assert tokenizer.decode([x for x in labels if x != -100]) == f"{answer}<|im_end|>"
    assert sorted(table["row"].to_pylist()) == [0, 2]
    judged = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False, True)]
    run(prepare((write_lines(tmp_path / "k.jsonl", judged), {"type": "kto"})), tmp_path / "kto")
    table = table_of(tmp_path / "kto")
    assert table.schema.field("desirable").type == pa.bool_()
    by_row = dict(zip(table["row"].to_pylist(), table["desirable"].to_pylist(), strict=True))
    assert by_row == {0: True, 1: False, 2: True}


def test_the_tally_is_what_the_file_holds(tmp_path):
    records = [{"text": "x" * n} for n in (1, 3, 4, 30, 90)]
    path = write_lines(tmp_path / "a.jsonl", [*records, {"text": ""}])
    _, facts = run(prepare((path, {"type": "text", "max_seq_len": 40})), tmp_path / "out")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    tally = plan["slices"][0]["tally"]
    lengths = [len(row) for row in table_of(tmp_path / "out")["input_ids"].to_pylist()]
    assert sorted(lengths) == [2, 4, 5, 31, 40]
    assert (tally["rows"], tally["tokens"], tally["trained_tokens"]) == (5, 82, 77)
    assert tally["lengths"] == {"2": 1, "4": 1, "8": 1, "32": 1, "64": 1}
    assert (tally["truncated"], tally["tokens_cut"]) == (1, 51)
    assert tally["left_out"] == {"empty": 1}
    assert facts["tokens"]["train"] == np.sum(lengths)
