"""What a report tells of the data."""

import html
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.core.cache.data_facts import DATA, write_data_facts
from penstock.core.cache.stage import Artifact
from penstock.rows.reader import PackedRows
from penstock.train.data_samples import keep_shown_data
from penstock.train.launch.job import DATA_SAMPLES
from tests.cli.command import penstock, small_run
from tests.stages.prepared import table_of, texts, write_lines
from tests.stages.report.report_pages import Page, report_of, section_of
from tests.stages.train.told_runs import falling


@pytest.fixture(scope="module")
def data_facts(tmp_path_factory):
    """What two stages said of two real sources, and their samples as pyarrow reads them."""
    folder = tmp_path_factory.mktemp("data")
    first = write_lines(folder / "<b>one.jsonl", [*texts(40), {"text": "x"}, {"text": "x"}])
    second = write_lines(folder / "two.jsonl", texts(20, "another "))
    config = small_run(
        folder,
        data={
            "datasets": [{"path": str(path), "type": "text"} for path in (first, second)],
            "val_set_size": 7,
            "deduplicate": "exact",
        },
    )
    stages = penstock("pack", config, "--json").last["stages"]
    prepared, packed = (Artifact(s["stage"], s["key"], Path(s["path"])) for s in stages)
    write_data_facts(folder, packed, prepared)
    keep_shown_data(folder, packed.path, (), 0, pytest.fail)
    tables = {split: table_of(prepared.path, split) for split in ("train", "validation")}
    rows = {s: len(PackedRows(packed.path / "data" / s)) for s in tables}
    for artifact in (prepared, packed):
        shutil.rmtree(artifact.path)
    return folder / DATA, tables, rows


@pytest.mark.parametrize("outcome", ["finished", "none"])
def test_the_data_is_told_as_it_was_though_it_is_pruned(tmp_path, data_facts, outcome):
    file, tables, rows = data_facts
    tmp_path.joinpath(DATA).write_bytes(file.read_bytes())
    text = report_of(tmp_path, falling(3) if outcome == "finished" else [], outcome=outcome)
    page = Page(text)
    section = section_of(text, "Data")
    length = json.loads(file.read_text())["packed"]["row_length"]["train"]
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", section)
    told = dict(pairwise(cells))
    assert told["training samples"] == str(len(tables["train"])) == "54"
    assert told["validation samples"] == str(len(tables["validation"])) == "7"
    lengths = [len(ids) for ids in tables["train"]["input_ids"].to_pylist()]
    trained = sum(v != -100 for r in tables["train"]["labels"].to_pylist() for v in r[1:])
    assert f"{trained / sum(lengths):.1%} trained on" in section
    assert told[f"training rows of {length} tokens"] == str(rows["train"])
    assert told["exact duplicate"] == "1"
    for name in ("<b>one.jsonl", "two.jsonl"):
        its = [
            len(row["input_ids"]) for row in tables["train"].to_pylist() if row["source"] == name
        ]
        at = cells.index(html.escape(name))
        assert cells[at + 1 : at + 3] == ["training", str(len(its))]
        assert cells[at + 5] == f"{len(its) / len(lengths):.1%}"
    assert page.texts["title"]
    assert "<b>one" not in text


def test_bars_read_off_their_axis_are_the_lengths(tmp_path, data_facts):
    file, tables, _ = data_facts
    for name in (DATA, DATA_SAMPLES):
        tmp_path.joinpath(name).write_bytes(file.with_name(name).read_bytes())
    section = section_of(report_of(tmp_path, falling(3)), "Data")
    figures = re.findall(r'<figure class="bars">.*?</figure>', section, re.S)
    for figure, table in zip(figures, tables.values(), strict=True):
        lengths = [len(ids) for ids in table["input_ids"].to_pylist()]
        read = list(read_off(figure))
        for low, high, height, told in read:
            count = sum(low <= length <= high for length in lengths)
            assert height == pytest.approx(count, abs=0.05)
            assert told == count > 0
        assert sum(told for *_, told in read) == len(lengths)
        assert f"Shortest {min(lengths)}, " in figure
        assert f"longest {max(lengths)}." in figure


def read_off(figure):
    """(shortest, longest, height on its axis, count that it says) of every bar."""
    (drawing,) = re.findall(r"<svg.*?</svg>", figure, re.S)
    marks = re.findall(r'class="y" style="top:([\d.]+)%">([^<]+)<', figure)
    axis = sorted((float(y), float(value)) for y, value in marks)
    (top, high), (bottom, low) = axis[0], axis[-1]
    for bar in ElementTree.fromstring(drawing).findall(".//{*}path[@class='bar']"):
        y = re.match(r"M[\d.]+ 1000\.0V([\d.]+)H", bar.get("d", ""))
        name, count = (bar.findtext("{*}title") or "").replace(",", "").split(": ")
        assert y
        ends = [int(end) for end in name.split(" to ")]
        height = high + (float(y[1]) / 10 - top) * (low - high) / (bottom - top)
        yield ends[0], ends[-1], height, int(count)


def test_a_run_that_counted_no_lengths_shows_those_of_its_stages(tmp_path, data_facts):
    file, _, _ = data_facts
    tmp_path.joinpath(DATA).write_bytes(file.read_bytes())
    section = section_of(report_of(tmp_path, falling(3)), "Data")
    counts = json.loads(file.read_text())["prepared"]["lengths"]["train"]
    figure = section.split("<h3>Tokens of training samples")[1].split("</figure>")[0]
    told = [int(count) for count in re.findall(r"<title>[^<]*: (\d+)</title>", figure)]
    assert told == [counts[upper] for upper in sorted(counts, key=int)]


def test_a_run_that_kept_nothing_of_its_data_has_no_such_section(tmp_path):
    assert "<h2>Data</h2>" not in report_of(tmp_path, falling(3))
