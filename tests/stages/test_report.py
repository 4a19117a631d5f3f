import html
import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.config.load import loads
from penstock.core.data_facts import DATA, keep_data_facts
from penstock.core.files import write_json
from penstock.core.stage import Artifact
from penstock.rows.reader import PackedRows
from penstock.train.job import METRICS, OUTCOME, Job
from penstock.train.metrics import MetricsLog
from penstock.train.report import write_report
from penstock.train.report.chart import smoothed
from tests.cli.command import penstock, small_run
from tests.stages.prepared import table_of, texts, write_lines

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """A page as a browser reads it. Fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def record(step, loss, **more):
    return {
        "step": step,
        "epoch": step / 100,
        "loss": loss,
        "lr": 1e-3 / step,
        "grad_norm": 2.0 + step % 3,
        "tokens": 1000 + step,
        "trained_tokens": 500,
        "tokens_per_second": 20_000.0 - step,
        "seconds": 0.05,
        **more,
    }


def falling(count):
    return [record(step, 1 + 4 / step) for step in range(1, count + 1)]


def report_of(folder, records, evaluations=(), outcome="finished", **sections):
    settings = {
        "model": {"config_path": "builtin:tiny-qwen3"},
        "data": {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
        "train": {"output_dir": str(folder)},
        **sections,
    }
    folder.mkdir(exist_ok=True)
    run = loads(settings)
    Job(
        "0" * 64, run, folder, "1" * 64, (), 258, "builtin:tiny-qwen3", None, folder, launch="1"
    ).write()
    log = MetricsLog(folder / METRICS, 0)
    for each in records:
        log.append(each)
    for step, loss in evaluations:
        log.append({"step": step, "eval_loss": loss})
    log.close()
    if outcome == "finished":
        write_json(folder / OUTCOME, {"facts": {}, "step": len(records), "signal": None})
    return write_report(folder).read_text()


def chart_of(page_text, name):
    figure = page_text.split(f'data-chart="{name}"')[1].split("</figure>")[0]
    (drawing,) = re.findall(r"<svg.*?</svg>", figure, re.S)
    svg = ElementTree.fromstring(drawing)
    paths = {path.get("class"): path.get("d") for path in svg.findall(".//{*}path")}
    ticks = re.findall(r'class="y" style="top:([\d.]+)%">([^<]+)<', figure)
    return paths, [(float(at), float(label)) for at, label in ticks]


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def test_the_numbers_on_the_page_are_those_of_the_metrics(tmp_path):
    records = falling(50)
    text = report_of(tmp_path, records, [(50, 1.25)])
    payload = re.search(r'id="steps">(.*?)</script>', text)
    assert payload
    values = json.loads(payload[1])["values"]
    for name in ("step", "loss", "lr", "grad_norm", "tokens_per_second"):
        assert values[name] == [each[name] for each in records]
    page = Page(text)
    assert dict(zip(page.texts["dt"], page.texts["dd"], strict=True)) == {
        "final loss": "1.08",
        "held-out loss": "1.25",
        "steps": "50",
        "epochs": "0.50",
        "tokens": "51.3 k",
        "of them trained on": "25 k",
        "tokens per second, median": "20 k",
        "time in steps": "2.5 s",
    }


def test_the_curve_read_off_its_axes_is_the_loss(tmp_path):
    records = falling(50)
    paths, ticks = chart_of(report_of(tmp_path, records, [(50, 1.5)]), "loss")
    (top, high), (bottom, low) = min(ticks), max(ticks)

    def read_off(y):
        return high + (y / 10 - top) * (low - high) / (bottom - top)

    drawn = points(paths["raw"])
    assert [read_off(y) for _, y in drawn] == pytest.approx([r["loss"] for r in records], abs=1e-3)
    assert [x for x, _ in drawn] == pytest.approx([1000 * i / 49 for i in range(50)], abs=0.1)
    ((x, y),) = points(paths["dots"])
    assert (x, read_off(y)) == pytest.approx((1000, 1.5), abs=1e-3)


def test_a_long_run_is_drawn_small_and_keeps_its_spikes(tmp_path):
    records = falling(20_000)
    records[12_345]["loss"] = 9.0
    text = report_of(tmp_path, records)
    paths, _ = chart_of(text, "loss")
    x, _ = min(points(paths["raw"]), key=lambda point: point[1])
    assert x == pytest.approx(1000 * 12_345 / 19_999, abs=0.1)
    assert len(text) < 250_000


@pytest.mark.parametrize(
    "records",
    [
        [],
        falling(1),
        falling(2),
        [record(1, math.nan), record(2, math.nan)],
        [record(1, 4.0), record(2, math.inf, grad_norm=math.nan), record(3, 3.0), record(4, 3.0)],
        [record(step, 10.0 ** (5 - step)) for step in range(1, 12)],
    ],
    ids=["none", "one", "two", "only NaN", "some NaN", "many decades"],
)
def test_every_page_is_well_formed_and_asks_for_nothing_from_elsewhere(tmp_path, records):
    text = report_of(tmp_path, records, outcome="none")
    page = Page(text)
    assert page.texts["title"] == ["finetune · Penstock"]
    assert "not finished" in page.texts["p"]
    svgs = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(svgs) == (4 if records else 0)
    for svg in svgs:
        assert "nan" not in "".join(ElementTree.fromstring(svg).itertext()).lower()
        assert not re.search(r'd="[^"]*(nan|inf)', svg)
    payload = re.search(r'id="steps">(.*?)</script>', text)
    assert payload
    json.loads(payload[1], parse_constant=lambda name: pytest.fail(f"browsers cannot read {name}"))
    targets = [tag.get("href") or tag.get("src") for tag in (*page.named("link"), *page.named("a"))]
    assert targets == ["data:,"]
    assert [tag for tag in page.named("script") if tag.get("src")] == []
    assert "default-src 'none'" in text


def test_what_users_write_is_shown_and_never_obeyed(tmp_path):
    name = "</title><script>alert(1)</script>"
    path = '"><img src=x onerror=alert(1)>.jsonl'
    text = report_of(
        tmp_path,
        falling(3),
        pipeline={"name": name},
        data={"datasets": [{"path": path, "type": "text"}]},
    )
    page = Page(text)
    assert len(page.named("script")) == 2
    assert page.named("img") == []
    assert page.texts["h1"] == [name]
    assert path in page.texts["td"]


def test_credentials_are_left_out(tmp_path):
    text = report_of(
        tmp_path,
        falling(3),
        launch={"env": {"SECRET_NAME": "hunter2"}},
        data={"datasets": [{"path": "https://me:hunter2@host/rows.jsonl", "type": "text"}]},
    )
    assert "hunter2" not in text
    assert "https://host/rows.jsonl" in text
    assert "launch.env.SECRET_NAME" in text


def test_the_command_writes_it_again_and_says_what_hinders_it(tmp_path):
    report_of(tmp_path, falling(3))
    page = tmp_path / "report.html"
    page.unlink()
    said = penstock("report", tmp_path, "--json")
    assert said.last["reports"] == [str(page)]
    assert "<h1>finetune</h1>" in page.read_text()
    page.unlink()
    page.mkdir()
    said = penstock("report", tmp_path)
    assert said.code == 1
    assert "no report of" in said.err
    assert "is a directory" in said.err


def test_only_what_differs_from_the_defaults_is_listed_first(tmp_path):
    text = report_of(tmp_path, falling(2), lora={"enable_lora": True, "lora_rank": 16})
    changed, rest = text.split("<details>")
    assert "lora.enable_lora" in changed
    assert "lora.lora_rank" not in changed
    assert "lora.lora_rank" in rest


def test_smoothing_is_the_two_sided_exponential_mean():
    values = [math.sin(i) + i / 40 for i in range(300)]
    values[7] = math.nan
    keep = math.exp(-1 / 3)  # one per cent of the run
    for i, got in enumerate(smoothed(values)):
        weighed = [(keep ** abs(i - j), v) for j, v in enumerate(values) if math.isfinite(v)]
        assert got == pytest.approx(sum(w * v for w, v in weighed) / sum(w for w, _ in weighed))


@pytest.mark.parametrize("highest", [0.0123, 0.9, 1.0, 7.3, 12_345.0])
def test_ticks_are_round_and_enclose_the_values(tmp_path, highest):
    _, ticks = chart_of(report_of(tmp_path, [record(1, 0.0), record(2, highest)]), "loss")
    marks = sorted(mark for _, mark in ticks)
    assert marks[0] == 0.0
    assert highest <= marks[-1] * 1.0001
    assert 3 <= len(marks) <= 8
    gaps = [b - a for a, b in pairwise(marks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))
    assert f"{gaps[0]:.3e}"[:4] in ("1.00", "2.00", "2.50", "5.00")


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
    keep_data_facts(folder, packed, prepared)
    tables = {split: table_of(prepared.path, split) for split in ("train", "validation")}
    rows = {s: len(PackedRows(packed.path / "data" / s)) for s in tables}
    for artifact in (prepared, packed):
        shutil.rmtree(artifact.path)
    return folder / DATA, tables, rows


def section_of(text, heading):
    (section,) = [s for s in text.split("<section>") if f"<h2>{heading}</h2>" in s]
    return section.split("</section>")[0]


@pytest.mark.parametrize("outcome", ["finished", "none"])
def test_the_data_is_told_as_it_was_though_it_is_pruned(tmp_path, data_facts, outcome):
    file, tables, rows = data_facts
    tmp_path.joinpath(DATA).write_bytes(file.read_bytes())
    text = report_of(tmp_path, falling(3) if outcome == "finished" else [], outcome=outcome)
    page = Page(text)
    section = section_of(text, "Data")
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", section)
    told = dict(pairwise(cells))
    assert told["training samples"] == str(len(tables["train"])) == "54"
    assert told["held-out samples"] == str(len(tables["validation"])) == "7"
    lengths = [len(ids) for ids in tables["train"]["input_ids"].to_pylist()]
    trained = sum(v != -100 for r in tables["train"]["labels"].to_pylist() for v in r[1:])
    assert f"{trained / sum(lengths):.1%} of them trained on" in section
    assert told["training rows of 32,000 tokens"] == str(rows["train"])
    assert told["exact duplicate"] == "1"
    for name in ("<b>one.jsonl", "two.jsonl"):
        its = [
            len(row["input_ids"]) for row in tables["train"].to_pylist() if row["source"] == name
        ]
        at = cells.index(html.escape(name))
        assert cells[at + 1 : at + 3] == ["training", str(len(its))]
        assert cells[at + 5] == f"{len(its) / len(lengths):.1%}"
    assert all(tag.get("class") for tag in page.named("b"))


def test_bars_read_off_their_axis_are_the_lengths(tmp_path, data_facts):
    file, tables, _ = data_facts
    tmp_path.joinpath(DATA).write_bytes(file.read_bytes())
    section = section_of(report_of(tmp_path, falling(3)), "Data")
    figures = re.findall(r'<figure class="bars">.*?</figure>', section, re.S)
    for figure, table in zip(figures, tables.values(), strict=True):
        (drawing,) = re.findall(r"<svg.*?</svg>", figure, re.S)
        paths = ElementTree.fromstring(drawing).findall(".//{*}path")
        (bars,) = (path.get("d", "") for path in paths if path.get("class") == "bar")
        marks = re.findall(r'class="y" style="top:([\d.]+)%">([^<]+)<', figure)
        axis = sorted((float(y), float(value)) for y, value in marks)
        (top, high), (bottom, low) = axis[0], axis[-1]
        heights = [float(y) / 10 for y in re.findall(r"M[\d.]+ 1000\.0V([\d.]+)H", bars)]
        read = [high + (y - top) * (low - high) / (bottom - top) for y in heights]
        exponents = [(len(ids) - 1).bit_length() for ids in table["input_ids"].to_pylist()]
        counts = [exponents.count(e) for e in range(min(exponents), max(exponents) + 1)]
        assert read == pytest.approx([count for count in counts if count], abs=0.05)


def test_a_run_that_kept_nothing_of_its_data_has_no_such_section(tmp_path):
    assert "<h2>Data</h2>" not in report_of(tmp_path, falling(3))
