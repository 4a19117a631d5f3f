"""Loss weights of messages, records and sources, from records to packed rows."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StageError
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings, MixSettings
from tests.stages.prepare.conversations import said
from tests.stages.prepare.encoding import CHATML, encode, unmarked, words
from tests.stages.prepared import contents, prepare, run, write_lines

WEIGHTS = st.sampled_from([0, 1, 0.5, 2, 0.1, 1e-6, 1e6, 3])
FORMS = {
    "marked": (words(CHATML), {}),
    "unmarked": (words(unmarked(CHATML)), {}),
    "turn by turn": (words(unmarked(CHATML)), {"turn_rendering": "per_turn"}),
}


def chat(weights):
    turns = [[said("user", f"Q{i}?"), said("assistant", "word " * (i + 1))] for i in range(3)]
    messages = [message for turn in turns for message in turn]
    for place, weight in zip((1, 3, 5), weights, strict=True):
        messages[place] = {**messages[place], "weight": weight}
    return messages


def sample(record, tokenizer, **its):
    found = Encoder(DatasetSettings(type="chat", **its), tokenizer)([record])
    assert not found.faults
    [side] = found.sides
    return side[0].ids, side[0].labels, side[0].dense_weights()


@settings(deadline=None, max_examples=40)
@given(st.tuples(WEIGHTS, WEIGHTS, WEIGHTS).filter(any), WEIGHTS.filter(bool), st.data())
def test_a_token_has_the_weight_of_its_message_times_that_of_its_record(weights, factor, data):
    tokenizer, its = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    record = {"messages": chat(weights), "w": factor}
    ids, labels, found = sample(record, tokenizer, field_weight="w", **its)
    alone = [sample({"messages": chat(one)}, tokenizer, **its) for one in np.eye(3).tolist()]
    want = sum(np.float32(w) * own for w, (_, _, own) in zip(weights, alone, strict=True))
    np.testing.assert_allclose(found, want * np.float32(factor), rtol=1e-6)
    assert (labels == np.where(found > 0, ids, -100)).all()
    assert all((ids == other).all() for other, _, _ in alone)


def test_prompts_that_are_trained_and_ends_of_answers_without_a_template_have_weights():
    tokenizer = words(CHATML)
    messages = chat((0.5, 0, 2))
    _, labels, weights = sample({"messages": messages}, tokenizer, train_on_prompt=True)
    counts = dict(zip(*np.unique(weights[labels != -100], return_counts=True), strict=True))
    assert counts.keys() == {0.5, 1.0, 2.0}
    record = {"instruction": "q", "output": "a", "w": 0.25}
    found = Encoder(DatasetSettings(type="instruction", field_weight="w"), words())([record])
    trained = found.sides[0][0].labels != -100
    assert found.sides[0][0].dense_weights()[trained].tolist() == [0.25] * trained.sum()
    assert found.sides[0][0].labels[-1] == words().eos_token_id


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (-0.5, "-0.5; a loss weight is 0, or from"),
        (math.nan, "is nan"),
        (math.inf, "is inf"),
        (10**400, "is inf"),
        (1e13, "is 1e\\+13; a loss weight"),
        (1e-13, "is 1e-13; a loss weight"),
        ("0.5", "is a string where a number"),
        ([1], "is a list where a number"),
    ],
)
def test_what_is_no_weight_is_refused_by_name(weight, why):
    said_in = {"messages": chat((1, 1, weight)), "w": 1}
    for record in (said_in, {"messages": chat((1, 1, 1)), "w": weight}):
        fault = encode(record, words(CHATML), type="chat", field_weight="w")
        assert fault.reason in ("bad_value", "wrong_type")
        with pytest.raises(type(fault), match=why):
            raise fault


def test_records_that_weigh_0_are_dropped_and_null_weighs_1():
    tokenizer = words(CHATML)
    nothing = encode(
        {"messages": chat((1, 1, 1)), "w": 0}, tokenizer, type="chat", field_weight="w"
    )
    assert (nothing.reason, nothing.why) == ("no_trained_tokens", "its w is 0")
    *_, weights = sample({"messages": chat((1, 1, 1)), "w": None}, tokenizer, field_weight="w")
    assert set(weights.tolist()) == {0.0, 1.0}


def test_completions_that_are_compared_have_no_fractions():
    record = {
        "prompt": "q",
        "chosen": [{**said("assistant", "a"), "weight": 0.5}],
        "rejected": [said("assistant", "b")],
    }
    fault = encode(record, words(CHATML), type="preference")
    assert "chosen has a message of weight 0.5; write 0 or 1" in fault.why


def packed_rows(artifact, out, **its):
    out.mkdir(parents=True)
    Pack(PackSettings(**{"sample_packing_sequence_len": 64, **its}), artifact).run(out)
    return [
        row
        for file in sorted((out / "data" / "train").glob("*.arrow"))
        for row in pa.ipc.open_file(file).read_all().to_pylist()
    ]


def texts(weights, word):
    return [{"text": f"{word}{n:03d} " + "x" * (n % 9), "w": w} for n, w in enumerate(weights)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "wrapped"])
def test_packed_labels_have_the_weights_of_their_record_and_source(tmp_path, method):
    sources = {"a": ([1, 0.5, None, 4] * 8, 1.0), "b": ([1] * 20, 0.25), "c": ([1] * 5, 0.0)}
    named = {"type": "text", "field_weight": "w"}
    paths = {
        word: write_lines(tmp_path / f"{word}.jsonl", texts(weights, word))
        for word, (weights, _) in sources.items()
    }
    mix = tuple(MixSettings(loss_weight=factor) for _, factor in sources.values())
    plain = {**named, "field_weight": None}
    datasets = [(path, named if word == "a" else plain) for word, path in paths.items()]
    artifact, _ = run(prepare(*datasets, mix=mix), tmp_path / "prepared")
    rows = packed_rows(artifact, tmp_path / "packed", sample_packing_method=method)
    found = {}
    for row in rows:
        assert len(row["loss_weights"]) == len(row["labels"])
        text = bytes(label if 0 <= label < 256 else 0 for label in row["labels"])
        for label, weight in zip(row["labels"], row["loss_weights"], strict=True):
            assert (label == -100) == (weight == 0)
        for place in range(len(text) - 2):
            digits = text[place : place + 3]
            if digits.isdigit():
                source = chr(row["input_ids"][place])
                found.setdefault((source, int(digits)), set()).update(
                    row["loss_weights"][place : place + 3]
                )
    assert not any(source == "c" for source, _ in found)
    cut = 0
    for word in "ab":
        weights, factor = sources[word]
        for number, weight in enumerate(weights):
            cut += (word, number) not in found  # where a row ends between its digits
            want = {factor * (1 if weight is None else weight)}
            assert found.get((word, number), want) == want
    assert cut <= (8 if method == "wrapped" else 0)


def test_weights_that_are_all_equal_leave_the_packed_files_as_they_are(tmp_path):
    its = {"type": "text", "field_weight": "w"}
    made = {}
    for weight in (1, 0.3, None):
        path = write_lines(tmp_path / str(weight) / "a.jsonl", texts([weight or 1] * 30, "a"))
        settings_of = its if weight else {"type": "text"}
        mix = (MixSettings(loss_weight=0.7 if weight == 0.3 else 1.0),)
        artifact, _ = run(prepare((path, settings_of), mix=mix), tmp_path / f"p{weight}")
        packed_rows(artifact, tmp_path / f"k{weight}")
        made[weight] = contents(tmp_path / f"k{weight}")
    assert made[1] == made[0.3] == made[None]


TOKENS = st.lists(st.tuples(st.integers(32, 126), WEIGHTS, st.booleans()), min_size=2, max_size=20)


@settings(deadline=None, max_examples=60)
@given(TOKENS, st.sampled_from([None, "labels", "mask", "padded"]), WEIGHTS.filter(bool))
def test_tokens_of_a_tokenized_record_have_the_weights_of_its_column(tokens, beside, factor):
    ids, weights, trains = (list(each) for each in zip(*tokens, strict=True))
    record = {"input_ids": ids, "loss_weights": weights, "w": factor}
    want = np.array(weights, dtype=np.float32)
    if beside == "labels":
        record["labels"] = [i if t else -100 for i, t in zip(ids, trains, strict=True)]
        want = want * trains
    elif beside == "mask":
        record["loss_mask"] = [int(t) for t in trains]
        want = want * trains
    elif beside == "padded":
        record |= {"input_ids": [0, *ids], "loss_weights": [7, *weights]}
        record["attention_mask"] = [0] + [1] * len(ids)
    its = DatasetSettings(type="tokenized", field_weight="w")
    found = Encoder(its, words())([record])
    if not want[1:].any():
        assert found.faults[0].reason == "no_trained_tokens"
        return
    [side] = found.sides
    assert side[0].ids.tolist() == ids
    assert side[0].labels.tolist() == [i if w else -100 for i, w in zip(ids, want, strict=True)]
    np.testing.assert_allclose(side[0].dense_weights(), want * np.float32(factor), rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([1, 1], "input_ids has 3 entries and loss_weights 2"),
        (0.5, "input_ids has 3 entries and loss_weights a number"),
        ([1, -0.5, 1], r"loss_weights\[1\] is -0.5; a loss weight is 0, or from"),
        ([1, 1, math.nan], r"loss_weights\[2\] is nan"),
        ([math.inf, 1, 1], r"loss_weights\[0\] is inf"),
        ([1, 10**400, 1], r"loss_weights\[1\] is inf"),
        ([1, 1e13, 1], r"loss_weights\[1\] is 1e\+13; a loss weight"),
        ([1, True, 1], r"loss_weights\[1\] is a boolean where a number"),
        ([1, None, 1], r"loss_weights\[1\] is null where a number"),
        ([1, "1", 1], r"loss_weights\[1\] is a string where a number"),
    ],
)
def test_what_is_no_weight_of_a_token_is_refused_by_name(weights, why, tmp_path):
    record = {"input_ids": [1, 2, 3], "loss_weights": weights}
    good = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_weights": None}
    path = write_lines(tmp_path / "a.jsonl", [good, record])
    with pytest.raises(StageError, match=rf"a.jsonl:2: {why}"):
        run(prepare((path, {"type": "tokenized"})), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "multipack", "wrapped"])
def test_packed_tokens_have_the_weights_of_their_column_and_source(tmp_path, method):
    """Each id occurs once, so that it tells which weight its label has."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(2, 40, 60).cumsum()
    weights = draw.choice([0.0, 1.0, 0.5, 2.0, 0.125], sizes[-1])
    ids = [*range(sizes[-1])]
    records = [
        {"input_ids": ids[a:b], "loss_weights": weights[a:b].tolist()}
        for a, b in zip([0, *sizes], sizes, strict=False)
    ]
    path = write_lines(tmp_path / "a.jsonl", records)
    model = tmp_path / "model"
    words().save_pretrained(model)
    its = {"type": "tokenized"}
    mix = (MixSettings(loss_weight=3.0),)
    artifact, _ = run(prepare((path, its), mix=mix, tokenizer=str(model)), tmp_path / "prepared")
    rows = packed_rows(artifact, tmp_path / "packed", sample_packing_method=method)
    seen = 0
    for row in rows:
        for label, weight in zip(row["labels"], row["loss_weights"], strict=True):
            assert weight == (0 if label == -100 else 3 * weights[label])
            seen += label != -100
    # The first token of a record is never trained, nor that of a row.
    starts = {0, *sizes.tolist()}
    wanted = sum(1 for i in ids if weights[i] and i not in starts)
    assert 0 <= wanted - seen <= (len(rows) if method == "wrapped" else 0)
