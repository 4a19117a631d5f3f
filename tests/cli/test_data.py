import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.files import read_json
from tests.cli.command import penstock, small_run
from tests.stages.prepared import table_of, texts, write_lines

SPECIAL = {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>"}


def spelled(ids):
    """Byte-level tokens as text, without any tokenizer."""
    return b"".join(SPECIAL[i].encode() if i in SPECIAL else bytes([i]) for i in ids).decode()


def trained_of(row):
    """Tokens that are somebody's target: the first of a sample is nobody's."""
    return [t > 0 and label != -100 for t, label in enumerate(row["labels"])]


def prepared_folder(said):
    (stage,) = said.last["stages"]
    assert stage["stage"] == "prepare"
    return Path(stage["path"])


def run_on(folder, *datasets, **data):
    return small_run(folder, data={"datasets": list(datasets), **data})


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A prepared run of conversations: its config and its samples as pyarrow reads them."""
    folder = tmp_path_factory.mktemp("chats")
    said = [
        {"messages": [{"role": role, "content": text} for role, text in turns]}
        for turns in (
            [("user", "héé?"), ("assistant", "[red]ö[/red]"), ("user", "?"), ("assistant", "🙂")],
            [("system", "s"), ("user", "a\x1b[31m\rb\u202e"), ("assistant", "\x9b1m\x07")],
            [("user", "one line"), ("assistant", "two\nlines")],
        )
    ]
    source = write_lines(folder / "chats.jsonl", said)
    config = run_on(folder, {"path": str(source), "type": "chat"})
    said = penstock("prepare", config, "--json")
    return config, table_of(prepared_folder(said)).to_pylist()


def painted(text):
    """(characters, whether each is green) of what a terminal was sent."""
    seen, green, look = [], [], False
    for codes, characters in re.findall(r"\x1b\[([\d;]*)m|([^\x1b]+)", text):
        if characters:
            seen.append(characters)
            green += [look] * len(characters)
        else:
            look = "32" in codes.split(";")
    return "".join(seen), green


def test_green_on_a_terminal_is_exactly_what_is_trained(chats, monkeypatch):
    config, rows = chats
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text, green = painted(penstock("data", "show", config, "--index", 0, "--index", 2).out)
    for row in (rows[0], rows[2]):
        whole = spelled(row["input_ids"])
        at = text.index(whole)
        shown = "".join(c for c, on in zip(whole, green[at : at + len(whole)], strict=True) if on)
        flags = trained_of(row)
        trained = spelled([i for i, on in zip(row["input_ids"], flags, strict=True) if on])
        assert shown == trained.replace("\n", "")  # the end of a line has no colour
    assert "".join(c for c, on in zip(text, green, strict=True) if on) == (
        "trained[red]ö[/red]<|im_end|>🙂<|im_end|>twolines<|im_end|>"
    )


@pytest.mark.parametrize("terminal", ["none", "without colours"])
def test_without_colours_marks_say_what_is_trained(chats, monkeypatch, terminal):
    config, rows = chats
    if terminal == "without colours":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
    out = penstock("data", "show", config, "--index", 0).out
    assert "\x1b" not in out
    assert "[[[red]ö[/red]<|im_end|>]]\n<|im_start|>user\n?<|im_end|>" in out
    assert f"{len(rows[0]['input_ids'])} tokens, " in out
    assert f" {sum(trained_of(rows[0]))} trained\n" in out


def test_nothing_in_the_data_steers_the_terminal(chats, monkeypatch):
    config, _ = chats
    for colours in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", colours)
        out = penstock("data", "show", config, "--index", 1).out
        assert not set(re.sub(r"\x1b\[[\d;]*m", "", out)) & {"\x1b", "\r", "\x07", "\x9b", "\u202e"}
        assert "a␛[31m␍b<U+202E>" in re.sub(r"\x1b\[[\d;]*m", "", out)


def test_json_gives_back_every_token_and_which_of_them_are_trained(chats):
    config, rows = chats
    samples = penstock("data", "show", config, "--n", 99, "--json").last["samples"]
    assert [sample["index"] for sample in samples] == [0, 1, 2]
    for sample, row in zip(samples, rows, strict=True):
        (part,) = sample["parts"]
        spans = part["spans"]
        assert [i for span in spans for i in span["input_ids"]] == row["input_ids"]
        flags = [span["trained"] for span in spans for _ in span["input_ids"]]
        assert flags == trained_of(row)
        assert part["trained_tokens"] == sum(flags)
        assert "".join(span["text"] for span in spans) == spelled(row["input_ids"])
        assert {i for s in spans if s["special"] for i in s["input_ids"]} == {257, 258}


def located(sample, folder):
    """The record at the place that was told, read without our readers."""
    path, line = folder / sample["file"], sample["line"]
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()[line - 1]["text"]
    lines = path.read_text().splitlines()
    return lines[line - 1]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_every_sample_is_found_at_the_place_it_is_said_to_come_from(tmp_path, kind):
    values = [f"value {n:03d} " * (1 + n % 3) for n in range(40)]
    records = [{"text": value} for value in values]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write_lines(path, [line for n, r in enumerate(records) for line in [r, *[""] * (n % 3)]])
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1))
    elif kind == "csv":
        path.write_text("text\n" + "".join(f"{value}\n" for value in values))
    elif kind == "txt":
        path.write_text("\n".join(values))
    else:
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    source = {"path": str(path), "type": "text", "shards": 3, "shards_idx": 1}
    config = run_on(tmp_path, source, dataset_shard_num=2, dataset_shard_idx=1, val_set_size=2)
    for split in ("train", "validation"):
        said = penstock("data", "show", config, "--n", 99, "--split", split, "--json")
        samples = said.last["samples"]
        assert 2 <= len(samples) <= 8
        for sample in samples:
            text = "".join(span["text"] for span in sample["parts"][0]["spans"])
            value = text.removesuffix("<|im_end|>").strip()
            there = located(sample, tmp_path)
            if kind == "json":  # the line is where the object begins, and its value the next one
                there = (tmp_path / sample["file"]).read_text().splitlines()[sample["line"]]
            assert value in there


def test_a_pair_is_shown_as_its_prompt_and_both_answers(tmp_path):
    pairs = [{"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}]
    source = write_lines(tmp_path / "pairs.jsonl", pairs)
    config = run_on(tmp_path, {"path": str(source), "type": "preference"})
    words = ("data", "show", config, "--pipeline.stages", "[prepare]")
    parts = penstock(*words, "--json").last["samples"][0]["parts"]
    texts = {part["name"]: "".join(span["text"] for span in part["spans"]) for part in parts}
    assert list(texts) == ["prompt", "chosen", "rejected"]
    assert texts["prompt"].endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert (texts["chosen"], texts["rejected"]) == ("four<|im_end|>\n", "five<|im_end|>\n")
    assert [part["trained_tokens"] for part in parts] == [0, 5, 5]
    out = penstock(*words).out
    assert "[[four<|im_end|>]]" in out
    assert "[[five<|im_end|>]]" in out
    assert out.count("2 + 2?") == 1
    said = penstock("data", "stats", config, "--pipeline.stages", "[prepare]")
    assert said.code == 0
    assert "multipack" in said.out


def test_a_judged_answer_is_shown_with_its_verdict(tmp_path):
    words = ("two", "six")
    judged = [{"prompt": "2?", "completion": word, "label": word == "two"} for word in words]
    source = write_lines(tmp_path / "judged.jsonl", judged)
    config = run_on(tmp_path, {"path": str(source), "type": "kto"})
    out = penstock("data", "show", config, "--pipeline.stages", "[prepare]").out
    good, bad = out.split("train sample ")[1:]
    assert "\ndesirable, " in good
    assert "[[two<|im_end|>]]" in good
    assert "\nundesirable, " in bad
    assert "[[six<|im_end|>]]" in bad
    out = penstock("data", "stats", config, "--pipeline.stages", "[prepare]").out
    assert "1 of 2 train answers are desirable (50.0%)" in out


def test_a_scored_pair_is_shown_with_what_parts_its_answers(tmp_path):
    pair = {"prompt": "2?", "chosen": "two", "rejected": "six", "good": 8, "bad": 2.5}
    source = write_lines(tmp_path / "scored.jsonl", [pair])
    columns = {"field_chosen_score": "good", "field_rejected_score": "bad"}
    named = {"path": str(source), "type": "preference", **columns}
    out = penstock("data", "show", run_on(tmp_path, named), "--pipeline.stages", "[prepare]").out
    assert "\nchosen, scored 5.5 higher, " in out
    assert out.count("higher") == 1


def test_labels_that_are_other_tokens_are_pointed_out(tmp_path):
    ids = [72, 101, 121, 258]
    rows = [{"input_ids": ids, "labels": [-100, *shifted]} for shifted in (ids[1:], [121, 258, 72])]
    source = write_lines(tmp_path / "tokens.jsonl", rows)
    config = run_on(tmp_path, {"path": str(source), "type": "tokenized"})
    right, wrong = penstock("data", "show", config).out.split("train sample ")[1:]
    assert "other tokens" not in right
    assert "3 labels are other tokens than those shown" in wrong


def test_samples_are_drawn_by_seed_and_by_source(tmp_path):
    sources = [write_lines(tmp_path / f"{word}.jsonl", texts(30, word)) for word in ("ab", "cd")]
    config = run_on(tmp_path, *({"path": str(path), "type": "text"} for path in sources))

    def drawn(*more):
        said = penstock("data", "show", config, "--n", 5, "--json", *more)
        return [sample["index"] for sample in said.last["samples"]]

    assert drawn() == drawn("--seed", 42)
    assert drawn() != drawn("--seed", 1)
    assert len(set(drawn())) == 5
    for name in ("cd.jsonl", "data.datasets.1", sources[1]):
        assert min(drawn("--source", name)) >= 30
    assert drawn("--index", 59) == [59]

    for words, fault in {
        ("--source", "cd.json"): "Did you mean cd.jsonl",
        ("--index", "60"): "60 samples, from 0 to 59",
        ("--index", "3", "--seed", "1"): "Leave one of them out",
        ("--index", "3", "--source", "cd.jsonl"): "--index 3 is a sample of ab.jsonl",
        ("--split", "validation"): "Write data.val_set_size",
        ("--n", "0"): "greater than or equal to 1",
    }.items():
        said = penstock("data", "show", config, *words)
        assert said.code == 2
        assert fault in said.err


def test_no_upstream_prepares_nothing_and_other_runs_are_left_as_they_are(tmp_path):
    config = small_run(tmp_path)
    for command in ("show", "stats"):
        said = penstock("data", command, config, "--no-upstream", "--json")
        assert said.code == 1
        assert "Leave out --no-upstream, or run penstock prepare first" in said.err
    assert not (tmp_path / "data").exists()
    first = penstock("data", "stats", config, "--json").last["stages"]
    again = penstock("data", "show", config, "--no-upstream", "--json").last["stages"]
    refreshed = penstock("data", "show", config, "--pipeline.cache", "off", "--json").last["stages"]
    assert [stage["status"] for (stage,) in (first, again, refreshed)] == ["ran", *["cached"] * 2]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two sources and a test set, drawn at random, with records of several faults."""
    folder = tmp_path_factory.mktemp("mixed")
    more = [{"text": "again"}, {"text": "again"}, {"txt": "?"}, {"text": ""}]
    first = write_lines(folder / "first.jsonl", [*texts(50, "one "), *more])
    second = write_lines(folder / "second.jsonl", texts(30, "another "))
    held = write_lines(folder / "held.jsonl", texts(10, "held "))
    config = run_on(
        folder,
        {"path": str(first), "type": "text", "weight": 3.0, "max_seq_len": 40},
        {"path": str(second), "type": "text"},
        test_datasets=[{"path": str(held), "type": "text"}],
        mix_strategy="random",
        samples_per_epoch=100,
        deduplicate="exact",
        bad_rows_allowed=0.1,
        sample_packing_method="multipack",
    )
    said = penstock("data", "stats", config, "--json")
    return config, said.last, prepared_folder(said)


def test_statistics_are_what_plain_pyarrow_counts(mixed):
    _, told, folder = mixed
    for split, num_sources in (("train", 2), ("validation", 1)):
        table = table_of(folder, split)
        lengths = np.array([len(ids) for ids in table["input_ids"].to_pylist()])
        trained = np.array([sum(v != -100 for v in row[1:]) for row in table["labels"].to_pylist()])
        of = np.array(table["source"].to_pylist())
        its = told["splits"][split]
        assert len(its["sources"]) == num_sources
        whole = {"label": None, **its}
        for each in (whole, *its["sources"]):
            chosen = of == each["label"] if each["label"] else np.ones(len(of), dtype=bool)
            mine = sorted(lengths[chosen].tolist())
            assert each["samples"] == len(mine)
            assert each["tokens"] == sum(mine)
            assert each["trained_tokens"] == trained[chosen].sum()
            assert each["trained_share"] == pytest.approx(trained[chosen].sum() / sum(mine), 1e-5)
            for percent in (5, 50, 95):
                least = each["lengths"][f"p{percent}"]
                assert least in mine
                assert 100 * sum(length <= least for length in mine) >= percent * len(mine)
                assert 100 * sum(length < least for length in mine) < percent * len(mine)
            assert each["lengths"]["max"] == mine[-1]
        for bar in its["histogram"]:
            inside = (lengths > bar["above"]) & (lengths <= bar["to"])
            assert bar["samples"] == inside.sum()
        assert sum(bar["samples"] for bar in its["histogram"]) == len(lengths)


def test_what_was_dropped_is_counted_and_shown_with_its_place(mixed):
    config, told, _ = mixed
    assert told["records"] == 94
    assert told["dropped"] == {"empty": 1, "exact_duplicate": 1, "missing_column": 1}
    places = {each["reason"]: (each["file"], each["line"]) for each in told["dropped_samples"]}
    assert places == {
        "exact_duplicate": ("first.jsonl", 52),
        "missing_column": ("first.jsonl", 53),
        "empty": ("first.jsonl", 54),
    }
    assert told["truncated"] > 0
    out = penstock("data", "stats", config).out
    assert "94 records read, 3 dropped" in out
    assert f"{told['truncated']} truncated ({told['tokens_cut']} tokens)" in out
    assert "    first.jsonl:53: no column 'text'" in out


def test_the_mix_tells_shares_and_repeats(mixed):
    config, told, _ = mixed
    first, second = told["mix"]["sources"]
    assert (first["drawn"], second["drawn"]) == (75, 25)
    assert (first["repeats"], second["repeats"]) == (round(75 / 51, 4), round(25 / 30, 4))
    out = penstock("data", "stats", config).out
    assert "mix_strategy: random, 100 samples an epoch" in out
    assert re.search(r"first\.jsonl +51 +75 +75\.0% +1\.47x", out)


def test_packing_is_foretold_as_it_comes_to_pass(mixed):
    config, told, _ = mixed
    stage = penstock("pack", config, "--json").last["stages"][-1]
    foretold = {one["split"]: one for one in told["packing"]["methods"] if one["chosen"]}
    for split in ("train", "validation"):
        assert foretold[split]["method"] == "multipack"
        assert foretold[split]["rows"] == stage["facts"]["rows"][split]
        assert foretold[split]["fill"] == pytest.approx(stage["facts"]["fill"][split], abs=1e-6)


def test_bars_are_as_long_as_counts_are_high(mixed):
    config, told, _ = mixed
    out = penstock("data", "stats", config).out
    block = out.split("tokens of train samples\n")[1].split("\n\n")[0].splitlines()
    bars = told["splits"]["train"]["histogram"]
    assert len(block) == len(bars)
    most = max(bar["samples"] for bar in bars)
    eighths = " ▏▎▍▌▋▊▉█"
    for line, bar in zip(block, bars, strict=True):
        drawn = sum(eighths.index(c) for c in line if c in eighths)
        assert drawn == pytest.approx(8 * 48 * bar["samples"] / most, abs=1)
        assert line.endswith(f" {bar['samples']}")


def test_samples_that_fit_no_row_are_said_to_and_the_rest_is_told(tmp_path):
    config = small_run(tmp_path, data={"sample_packing_sequence_len": 128, "pad_to_multiple_of": 1})
    long = write_lines(tmp_path / "rows.jsonl", [{"text": "x" * 500}, {"text": "y"}])
    assert long.exists()
    said = penstock("data", "stats", config)
    assert said.code == 0
    assert "1 of 2 train samples are longer than a row of 128 tokens" in said.out
    assert re.search(r"train +rows\.jsonl +2 +503 ", said.out)


def test_looking_at_data_that_is_there_needs_no_heavy_library(chats):
    config, _ = chats
    code = (
        "import sys\n"
        "from penstock.cli.main import main\n"
        "for command in ('show', 'stats'):\n"
        "    try: main(['data', command, *sys.argv[1:]])\n"
        "    except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_given_data_is_shown_though_its_sources_are_gone(tmp_path):
    config = small_run(tmp_path)
    folder = prepared_folder(penstock("prepare", config, "--json"))
    (tmp_path / "rows.jsonl").unlink()
    words = (config, "--data.skip_prepare_dataset", "true", "--data.dataset_prepared_path", folder)
    said = penstock("data", "show", *words, "--index", 3, "--json")
    (sample,) = said.last["samples"]
    assert (sample["file"], sample["record"]) == (None, 3)
    plan = read_json(folder / "plan.json")
    assert sample["slice"] in {item["key"] for item in plan["slices"]}
