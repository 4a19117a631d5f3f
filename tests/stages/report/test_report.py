import json
import math
import re
import time
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from penstock.core.cache.record import write_record
from penstock.core.errors import ConfigError
from penstock.core.files import write_json
from penstock.train.launch.job import ENVIRONMENT, JOB, LOGS, OUTCOME, SAMPLES, Job
from penstock.train.metrics import recorder
from penstock.train.metrics.recorder import MetricsRecorder
from penstock.train.report import write_comparison, write_report
from penstock.train.report.chart import smooth_values
from penstock.train.report.heatmap import layer_step_map
from tests.cli.command import penstock
from tests.stages.report.report_pages import (
    Page,
    chart_of,
    numbers_of,
    points,
    report_of,
    section_of,
)
from tests.stages.train.told_runs import falling, job_in, record, tell
from tests.turns import one_day_in


def test_the_numbers_on_the_page_are_those_of_the_metrics(tmp_path):
    phases = {"forward": 0.5, "optimizer": 1.5, "communication": 0.25}
    used = {"memory_gib": 2.5, "memory_rank": 3}
    records = falling(50, tflops=1.5, mfu=None, **used, phases=phases)
    records[20] |= {"memory_gib": 3.5, "memory_rank": 1}
    more = {"eval_perplexity": 3.5, "eval_token_accuracy": 0.75, "eval_loss/a": 1.5}
    evaluation = {"step": 50, "eval_loss": 1.25, **more}
    job_in(tmp_path)
    tell(tmp_path, [*records, evaluation])
    text = write_report(tmp_path).read_text()
    [tables] = numbers_of(text)["tables"]
    for name in ("step", "loss", "lr", "grad_norm", "tokens_per_second", "tflops", "memory_gib"):
        assert tables["steps"][name] == [each[name] for each in records]
    assert tables["evaluations"] == {name: [value] for name, value in evaluation.items()}
    page = Page(text)
    assert dict(zip(page.texts["dt"], page.texts["dd"], strict=True)) == {
        "loss": "1.08",
        "evaluation loss": "1.25",
        "evaluation token accuracy": "75.0%",
        "steps": "50",
        "epochs": "0.50",
        "tokens": "51.3 k",
        "trained tokens": "25 k",
        "tokens per second, median": "20 k",
        "peak memory": "3.5 GiB on rank 1",
        "training time": "2.5 s",
    }
    spent = section_of(text, "Time by phase")
    assert re.findall(r"</i>(.*?) <b>(.*?)</b>", spent) == [
        ("update", "75.0 %"),
        ("forward", "25.0 %"),
    ]


def test_the_curve_read_off_its_axes_is_the_loss(tmp_path):
    records = falling(50)
    paths, ticks = chart_of(report_of(tmp_path, records, [(50, 1.5)]), "loss")
    (top, high), (bottom, low) = min(ticks), max(ticks)

    def read_off(y):
        return high + (y / 10 - top) * (low - high) / (bottom - top)

    drawn = points(paths[0, "raw"])
    assert [read_off(y) for _, y in drawn] == pytest.approx([r["loss"] for r in records], abs=1e-3)
    assert [x for x, _ in drawn] == pytest.approx([1000 * i / 49 for i in range(50)], abs=0.1)
    ((x, y),) = points(paths[1, "dots"])
    assert (x, read_off(y)) == pytest.approx((1000, 1.5), abs=1e-3)


def test_a_long_run_is_drawn_small_and_keeps_its_spikes(tmp_path):
    records = falling(20_000)
    records[12_345]["loss"] = 9.0
    text = report_of(tmp_path, records)
    paths, _ = chart_of(text, "loss")
    x, _ = min(points(paths[0, "raw"]), key=lambda point: point[1])
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
    svgs = re.findall(r"<svg xmlns.*?</svg>", text, re.S)
    assert len(svgs) == (4 if records else 0)
    for svg in svgs:
        assert "nan" not in "".join(ElementTree.fromstring(svg).itertext()).lower()
        assert not re.search(r'd="[^"]*(nan|inf)', svg)
    numbers_of(text)
    named = (*page.named("link"), *page.named("a"), *page.named("script"))
    targets = {each for tag in named if (each := tag.get("href") or tag.get("src"))}
    assert {each for each in targets if not each.startswith("#")} == {"data:,"}
    ids = {tag["id"] for _, tag in page.tags if "id" in tag}
    assert {each[1:] for each in targets if each.startswith("#")} <= ids
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
    tell(tmp_path, [*falling(3), {"step": 3, "warning": name}])
    answered = {"step": 3, "samples": [{"prompt": path, "answer": name}]}
    (tmp_path / SAMPLES).write_text(json.dumps(answered) + "\n")
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert len(page.named("script")) == 3
    assert page.named("img") == []
    assert page.texts["h1"] == [name]
    assert path in page.texts["td"]
    assert path in page.texts["h3"]
    assert name in page.texts["p"]
    assert name in page.texts["td"]


def test_credentials_are_left_out(tmp_path):
    text = report_of(
        tmp_path,
        falling(3),
        launch={"env": {"NCCL_DEBUG": "hunter2"}},
        data={"datasets": [{"path": "https://me:hunter2@host/rows.jsonl", "type": "text"}]},
    )
    assert "hunter2" not in text
    assert "https://host/rows.jsonl" in text
    assert "launch.env.NCCL_DEBUG" in text


def test_text_that_is_almost_a_url_is_shown_without_what_it_might_hide(tmp_path):
    torn = "http://me:hunter2@[host?sig=hunter2"
    asked = f"What is {torn} and https://example.org?q=1"
    text = report_of(tmp_path, falling(1), train={"sample_prompts": [asked]})
    assert "hunter2" not in text
    assert "What is http://... and https://example.org" in text
    assert Job.read(tmp_path / JOB).config.train.sample_prompts == [asked]  # word by word


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
    changed, rest = section_of(text, "Settings").split("<details")
    assert "lora.enable_lora" in changed
    assert "lora.lora_rank" not in changed
    assert "lora.lora_rank" in rest


def test_smoothing_is_the_two_sided_exponential_mean():
    values = [math.sin(i) + i / 40 for i in range(300)]
    values[7] = math.nan
    keep = math.exp(-1 / 3)  # one per cent of the run
    for i, got in enumerate(smooth_values(values)):
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


AROUND = {
    "started": "2026-01-02T03:04:05+00:00",
    "total_steps": 3,
    "host": "a host",
    "system": "a system",
    "device": "a device",
    "ranks": 8,
    "threads": 2,
    "layout": {"mode": "fsdp2", "shard": 8, "tensor": 1},
    "quantised": ["nf4"],
    "versions": {"penstock": "0.0", "torch": "9.9"},
}


def test_a_page_says_how_a_run_stands(tmp_path):
    write_json(tmp_path / ENVIRONMENT, {**AROUND, "total_steps": 40})
    assert "not finished" in report_of(tmp_path, falling(10), outcome="none")
    text = write_report(tmp_path, state="running").read_text()
    assert '<body data-refresh="30">' in text
    assert 'aria-valuenow="25"' in text
    assert ">10 of 40<" in text
    failure = {"rank": 1, "host": "h", "time": 1.0, "message": "the disk is full <b>", "error": ""}
    (tmp_path / LOGS).mkdir()
    write_json(tmp_path / LOGS / "failure_1.json", {**failure, "exit_code": 1, "traceback": ""})
    text = write_report(tmp_path).read_text()
    assert "failed: the disk is full &lt;b&gt;" in text
    assert "<body>" in text
    write_record(tmp_path / OUTCOME, {"facts": None, "step": 10, "signal": 15})
    assert "stopped after step 10" in write_report(tmp_path).read_text()


def test_a_page_tells_of_answers_layers_experts_lineage_and_surroundings(tmp_path):
    routers = {
        "layers": [1, 3],
        "imbalance": [1.0, 2.0],
        "entropy": [1.0, 0.5],
        "counts": [[3, 1], [2, 2]],
    }
    norms = {"embed_tokens": 1.0, "layers.0": 10.0}
    write_json(tmp_path / ENVIRONMENT, AROUND)
    answers = [
        {"step": step, "samples": [{"prompt": "why?", "answer": f"because {step}"}]}
        for step in (1, 3)
    ]
    (tmp_path / SAMPLES).write_text("".join(json.dumps(each) + "\n" for each in answers))
    text = report_of(tmp_path, falling(3, routers=routers, grad_norms=norms))
    page = Page(text)
    maps = numbers_of(text)["maps"]
    assert maps["grad_norms"]["rows"] == list(norms)
    assert maps["grad_norms"]["table"] == [[1.0, 10.0]] * 3
    assert maps["load"]["table"] == [[1.5, 1.0], [0.5, 1.0]]
    assert maps["imbalance"]["rows"] == ["layer 1", "layer 3"]
    assert "In the last step; 1 is balanced. Every expert got tokens." in text
    said = page.texts["p"]
    assert said.index("because 3") < said.index("because 1")
    told = dict(
        pairwise(re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", section_of(text, "Environment")))
    )
    assert told["device"] == "a device, 8 rank(s)"
    assert told["layout"] == "mode fsdp2, shard 8"
    assert told["torch"] == "9.9"
    assert "2026-01-02 03:04 UTC" in said


def test_tiles_of_a_long_run_are_means_of_its_stretches():
    values = [[float(step), 1.0] for step in range(1, 1201)]
    found = layer_step_map("x", "X", ["a", "b"], range(1, 1201), values).tooltip
    assert len(found["table"]) == 120
    assert found["table"][0] == [5.5, 1.0]
    assert found["columns"][-1] == "steps 1,191 to 1,200"


def test_two_runs_are_compared_on_one_page(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    report_of(one, falling(20), [(20, 1.5)])
    report_of(other, falling(40), train={"lr": 0.5}, pipeline={"name": "<i>second</i>"})
    said = penstock("report", one, other, "--output", tmp_path / "both.html", "--json")
    assert said.last["reports"] == [str(tmp_path / "both.html")]
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert page.texts["h2"][:2] == ["finetune", "<i>second</i>"]
    tables = numbers_of(text)["tables"]
    assert [len(each["steps"]["loss"]) for each in tables] == [20, 40]
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", section_of(text, "Settings that differ"))
    heading, *rows = [cells[at : at + 3] for at in range(0, len(cells), 3)]
    assert heading == ["setting", "A · one", "B · other"]
    changed = {name: values for name, *values in rows}
    assert changed["train.lr"] == ["5e-5", "0.5"]
    assert changed["pipeline.name"] == ["finetune", "&lt;i&gt;second&lt;/i&gt;"]
    assert changed.keys() == {"train.lr", "pipeline.name", "train.output_dir"}
    paths, _ = chart_of(text, "loss")
    ends = [points(paths[series, "raw"])[-1][0] for series in (0, 2)]
    assert ends == pytest.approx([1000 * 19 / 39, 1000], abs=0.1)
    assert (1, "dots") in paths


def test_too_many_runs_and_a_needless_output_are_refused(tmp_path):
    report_of(tmp_path, falling(1))
    with pytest.raises(ConfigError, match="7 runs are too many"):
        write_comparison([tmp_path] * 7, tmp_path / "x.html")
    said = penstock("report", tmp_path, "--output", tmp_path / "x.html")
    assert said.code == 2
    assert "--output names the page that compares" in said.err


def wait_for(is_there):
    deadline = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@one_day_in(2, of=1)
def test_a_page_is_written_again_while_training_runs_if_wanted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "POLL_SECONDS", 0.0)
    recorders = {}
    for name, seconds in (("never", 0), ("often", 0.1)):
        settings = {"report_interval": seconds, "log_format": "structured", "use_wandb": False}
        recorders[name] = MetricsRecorder(job_in(tmp_path / name, train=settings), done=0, total=9)
        recorders[name].log(record(1, 3.0))
        time.sleep(0.15)
        recorders[name].log(record(2, 2.0))
    file = tmp_path / "often" / "report.html"
    wait_for(file.is_file)

    def is_written_again():
        # Again and again: what is logged while a page is being written is on the next one.
        recorders["often"].log(record(3, 1.5))
        return "<dd>3</dd>" in file.read_text()

    wait_for(is_written_again)
    assert '<p class="standing running">' in file.read_text()
    for each in recorders.values():
        each.close()
    assert not (tmp_path / "never" / "report.html").exists()
    assert "no more" not in capsys.readouterr().err
