"""What a report shows of the data itself: samples with what of them is trained, and lengths."""

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.loading.load import loads
from penstock.rows.byte_vocabulary import byte_library_tokenizer
from penstock.rows.decoding import Decoder
from penstock.train import data_samples
from penstock.train import stage as train_stage
from penstock.train.data_samples import MOST_TOKENS, keep_shown_data
from penstock.train.launch.job import DATA_SAMPLES
from penstock.train.length_histogram import MOST_BARS, bar_names, length_histogram
from penstock.train.masked_text import BLOT, masked, masked_pieces
from penstock.train.report import write_report
from tests.config.values import smallest
from tests.stages.pack.test_preference_samples import packed, side, stored
from tests.stages.report.report_pages import Page, report_of
from tests.stages.train.told_runs import falling

IGNORED = -100


def ids(text):
    return list(text.encode())


def decoder():
    return Decoder(byte_library_tokenizer())


def kept(tmp_path, samples, kind="sft", number=3, **how):
    """What is kept of samples that are packed."""
    if kind == "sft":
        samples = [(sample, None) for sample in samples]
    folder = tmp_path / "packed"
    packed(stored(tmp_path / "prepared", kind, samples), folder, **how)
    keep_shown_data(tmp_path, folder, (), number, decoder)
    return json.loads((tmp_path / DATA_SAMPLES).read_text())


def chat(question, answer):
    return side(ids(question), ids(answer))


CHATS = [chat(f"<b>{n}+{n}?", f"{2 * n}&") for n in range(40)]


def text_of(part, kind):
    return "".join(text for its, text in part["spans"] if its == kind)


def test_marked_tokens_are_those_that_are_trained_whatever_packing_makes_of_them(tmp_path):
    shown = kept(tmp_path, CHATS, number=40, sample_packing_sequence_len=64)["samples"]
    told = {(text_of(part, "untrained"), text_of(part, "trained")) for [part] in shown}
    assert told == {(f"<b>{n}+{n}?", f"{2 * n}&") for n in range(40)}
    for [part] in shown:
        assert part["trained_tokens"] == len(text_of(part, "trained"))
        assert part["tokens"] == len(text_of(part, "untrained") + text_of(part, "trained"))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_of_a_pair_the_prompt_and_both_answers_are_shown(tmp_path, share_prompts):
    pairs = [
        (side(ids(f"why {n}?"), ids(f"good {n}")), side(ids(f"why {n}?"), ids(f"bad {n}")))
        for n in range(20)
    ]
    how = {"share_prompts": share_prompts, "sample_packing_sequence_len": 64}
    shown = kept(tmp_path, pairs, "preference", 5, **how)["samples"]
    assert len(shown) == 5
    for prompt, chosen, rejected in shown:
        n = re.fullmatch(r"why (\d+)\?", text_of(prompt, "untrained"))
        assert n
        assert prompt["trained_tokens"] == 0
        assert (chosen["name"], chosen["spans"]) == ("chosen answer", [["trained", f"good {n[1]}"]])
        assert (rejected["name"], rejected["spans"]) == (
            "rejected answer",
            [["trained", f"bad {n[1]}"]],
        )


@pytest.mark.parametrize("share_prompts", [True, False])
def test_of_a_judged_answer_the_prompt_and_the_verdict_are_shown(tmp_path, share_prompts):
    judged = [(side(ids(f"why {n}?"), ids(f"so {n}")), n % 2 == 0) for n in range(20)]
    how = {"share_prompts": share_prompts, "sample_packing_sequence_len": 64}
    shown = kept(tmp_path, judged, "kto", 20, **how)["samples"]
    told = {
        (text_of(prompt, "untrained"), answer["name"], text_of(answer, "trained"))
        for prompt, answer in shown
    }
    every = {
        (f"why {n}?", f"{'' if n % 2 == 0 else 'un'}desirable answer", f"so {n}") for n in range(20)
    }
    assert told == every


@pytest.mark.parametrize("number", [0, 1, 3, 50])
def test_as_many_samples_are_kept_as_are_asked_for(tmp_path, number):
    shown = kept(tmp_path, CHATS, number=number, sample_packing_sequence_len=64)
    assert len(shown["samples"]) == min(number, len(CHATS))
    assert shown["lengths"]["train"]["counts"]
    again = tmp_path / "again"
    again.mkdir()
    keep_shown_data(again, tmp_path / "packed", (), number, decoder if number else pytest.fail)
    assert json.loads((again / DATA_SAMPLES).read_text()) == shown


def test_training_keeps_as_many_samples_as_the_config_says(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(data_samples, "keep_shown_data", lambda *told: seen.append(told[3]))
    stage: Any = SimpleNamespace(
        packed=SimpleNamespace(path=tmp_path, facts={}),
        run_config=loads(smallest(train={"report_samples": 7})),
    )
    train_stage._keep_shown_data(tmp_path, stage)
    assert seen == [7]


@pytest.mark.parametrize(
    ("prompt", "answer"), [(10, 5_000), (5_000, 10), (5_000, 5_000), (380, 380), (200, 200)]
)
def test_of_a_long_sample_the_beginning_and_what_is_trained_first_are_shown(
    tmp_path, prompt, answer
):
    sample = chat("p" * prompt, "a" * answer)
    [[part]] = kept(tmp_path, [sample], sample_packing_sequence_len=16_384)["samples"]
    shown = sum(len(text) for kind, text in part["spans"] if kind != "left out")
    left_out = sum(int(t.replace(",", "")) for kind, t in part["spans"] if kind == "left out")
    assert shown <= MOST_TOKENS
    assert shown + left_out == part["tokens"] == prompt + answer
    assert part["trained_tokens"] == answer
    assert text_of(part, "untrained")[:10] == "p" * 10
    assert len(text_of(part, "trained")) >= 10


def test_samples_on_the_page_are_escaped_and_marked(tmp_path):
    kept(tmp_path, [chat("<script>alert(1)</script>", "</pre><mark>&amp;")])
    text = report_of(tmp_path, falling(3))
    assert "alert(1)" not in text  # without facts of the data there is no section of it
    facts = {"rows": {"train": 1, "validation": 0}, "fill": {"train": 1.0, "validation": 0.0}}
    packed_facts = {**facts, "lengths": {"train": {}, "validation": {}}}
    record = {"packed": packed_facts, "prepared": None, "made": {}}
    (tmp_path / "data.json").write_text(json.dumps(record))
    page = Page(write_report(tmp_path).read_text())
    assert "<script>alert(1)</script>" in page.texts["pre"]
    assert "</pre><mark>&amp;" in page.texts["mark"]
    assert "Tokens of training samples" in page.texts["h3"]


SECRETS = {
    "https://me:hunter2hunter2@host/x": "hunter2hunter2",
    "see https://host/x?sig=abcdef123456": "sig=abcdef123456",
    "hf_abcdefghijklmnopqrstuvwxyz": "hf_abcdefghijklmnop",
    "key sk-proj-abcdefghij0123456789": "abcdefghij0123456789",
    "AKIAABCDEFGHIJKLMNOP": "AKIAABCDEFGHIJKLMNOP",
    "ghp_0123456789abcdefghij": "0123456789abcdefghij",
    'password = "s3cr3tpassword"': "s3cr3tpassword",
    "Authorization: Bearer abcdefghij0123456789": "abcdefghij0123456789",
    "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----": "MIIE",
}


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_credential_is_blotted_out(tmp_path, text):
    assert SECRETS[text] not in masked(text)
    assert len(masked(text)) == len(text)
    middle = text.index(SECRETS[text]) + 2
    shown = kept(tmp_path, [chat(text[:middle], text[middle:])])
    whole = "".join(span for _, span in shown["samples"][0][0]["spans"])
    assert whole == masked(text)
    assert BLOT in whole


@pytest.mark.parametrize(
    "text",
    [
        "def f(token: str, password=None): return secret",
        "The token is a word; skip-connections and skeletons.",
        "See https://example.org/a/b and mail me@example.org.",
        "1 + 1 = 2",
    ],
)
def test_plain_text_and_code_stay_as_they_are(text):
    assert masked_pieces([text[:7], text[7:]]) == [text[:7], text[7:]]


LENGTHS = st.one_of(
    st.lists(st.integers(1, 100), min_size=1, max_size=300),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=300),
    st.tuples(st.integers(1, 60), st.integers(1, 500_000)).map(lambda p: [p[0]] * 999 + [p[1]]),
)


@settings(deadline=None, max_examples=200)
@given(LENGTHS)
def test_every_length_is_counted_in_the_bar_that_says_it(lengths):
    found = length_histogram(np.array(lengths))
    edges, counts = found["edges"], found["counts"]
    assert edges == sorted(set(edges))
    assert min(edges) >= 1
    assert len(counts) == len(edges) - 1 <= MOST_BARS + 4
    for low, end, count in zip(edges, edges[1:], counts, strict=False):
        assert count == sum(low <= length < end for length in lengths)
    assert sum(counts) == len(lengths)
    assert len(list(bar_names(edges))) == len(counts)
    ordered = sorted(lengths)
    assert found["percentiles"]["shortest"] == ordered[0]
    assert found["percentiles"]["longest"] == ordered[-1]
    for name, part in (("median", 0.5), ("90%", 0.9), ("99%", 0.99)):
        value = found["percentiles"][name]
        assert value in lengths
        assert sum(each <= value for each in lengths) >= part * len(lengths) - 1e-6
        assert sum(each < value for each in lengths) <= part * len(lengths)


@pytest.mark.parametrize(
    "lengths",
    [
        np.random.default_rng(0).integers(50, 64, 5_000),
        np.random.default_rng(0).normal(700, 60, 5_000).astype(int),
        np.random.default_rng(0).lognormal(6, 1.2, 5_000).astype(int) + 1,
        np.append(np.random.default_rng(0).integers(50, 64, 5_000), 900_000),
    ],
    ids=["narrow", "bell", "wide", "one outlier"],
)
def test_bars_spread_what_they_count(lengths):
    counts = length_histogram(lengths)["counts"]
    assert max(counts) < 0.2 * len(lengths)
    assert sum(count > 0 for count in counts) >= 10
