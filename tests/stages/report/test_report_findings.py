"""What a report says of warnings, of evaluations, and of curves with a single point."""

import re

import pytest

from penstock.core.files import read_json, write_json
from penstock.train.eval.eval_results import (
    MAX_COMPLETIONS,
    write_held_out_results,
    write_task_scores,
)
from penstock.train.launch.job import ENVIRONMENT, EVAL_RESULTS
from penstock.train.report import write_report
from penstock.train.report.format import layout_text
from penstock.train.report.read_run import collect_warnings
from tests.stages.report.report_pages import Page, chart_of, points, report_of, section_of
from tests.stages.train.told_runs import falling, job_in, record, tell


def spike(step, loss, usual):
    numbers = {"loss": loss, "usual": usual, "deviations": 9.0}
    return {"step": step, "warning": f"the loss is {loss}", "spike": numbers}


FINDINGS = [{"name": "few_steps", "text": "gravest"}, {"name": "rows_dropped", "text": "grave"}]


def test_what_is_wrong_with_the_whole_run_is_told_before_anything_of_a_step():
    warned = [{"step": step, "warning": f"of {step}"} for step in range(1, 500)]
    told = collect_warnings(warned, falling(500), FINDINGS).active
    assert told[:4] == [
        ("run", "gravest"),
        ("run", "grave"),
        ("step 499", "of 499"),
        ("step 498", "of 498"),
    ]
    assert len(told) == 202


@pytest.mark.parametrize(
    ("later", "is_passing"),
    [
        ([0.12] * 30, True),
        ([0.36, 0.3, 0.2, *[0.12] * 30], True),
        ([0.37] * 30, False),  # the loss stays up
        ([0.12] * 2, False),  # too early to say
        ([], False),
    ],
)
def test_a_spike_that_the_loss_came_back_from_is_no_warning(later, is_passing):
    steps = [record(step, 0.12) for step in range(1, 31)]
    steps += [record(31 + at, loss) for at, loss in enumerate([0.38, *later])]
    found = collect_warnings([spike(31, 0.38, 0.12)], steps, FINDINGS)
    row = ("step 31", "the loss is 0.38")
    assert (row in found.recovered, row in found.active) == (is_passing, not is_passing)
    assert found.active[0] == ("run", "gravest")


def test_passing_spikes_stand_below_the_curve_and_the_highest_first(tmp_path):
    records = falling(60)
    records[29]["loss"], records[39]["loss"] = 4.0, 9.0
    text = report_of(tmp_path, [*records, spike(30, 4.0, 1.1), spike(40, 9.0, 1.1)])
    assert 'class="card warned"' not in text
    folded = text.split('id="spikes">')[1].split("</details>")[0]
    assert "2 spikes that the loss recovered from" in folded
    assert folded.index("the loss is 9") < folded.index("the loss is 4")
    assert text.index('data-chart="loss"') < text.index('id="spikes"')


def test_a_run_of_one_step_is_warned_of_above_all(tmp_path):
    around = {"layout": {}, "device": "d", "ranks": 1, "host": "h", "system": "s", "quantised": []}
    more = {"findings": FINDINGS, "total_steps": 1, "versions": {}}
    write_json(tmp_path / ENVIRONMENT, {**around, **more})
    text = report_of(tmp_path, [record(1, 15.55), {"step": 1, "warning": "late"}], [(1, 14.0)])
    box = text.split('class="card warned"')[1].split("</section>")[0]
    assert re.findall("<td>(.*?)</td>", box) == ["gravest", "grave", "late"]
    assert text.index('class="card warned"') < text.index('data-chart="loss"')
    assert '<p class="standing stopped">' in text


def test_a_single_evaluation_is_a_number_and_a_point(tmp_path):
    job_in(tmp_path)
    held = {"eval_loss": 1.25, "eval_perplexity": 3.5, "eval_token_accuracy": 0.75}
    tell(tmp_path, [*falling(50), {"step": 50, **held, "eval_loss/a": 1.0, "eval_loss/b": 2.0}])
    text = write_report(tmp_path).read_text()
    for name, value in (("eval_perplexity", "3.5"), ("eval_token_accuracy", "75.0%")):
        figure = text.split(f'data-chart="{name}"')[1].split("</figure>")[0]
        assert re.findall('<b class="value">(.*?)</b>', figure) == [value]
        paths = re.findall('class="dots" d="(.*?)"', figure)
        assert [points(path) for path in paths] == [[(500.0, 500.0)]]
    figure = text.split('data-chart="eval_sources"')[1].split("</figure>")[0]
    assert re.findall('</i>(.*?) <b class="value">(.*?)</b>', figure) == [("a", "1"), ("b", "2")]


def test_every_curve_of_a_single_step_is_a_number_and_a_point(tmp_path):
    text = report_of(tmp_path, falling(1))
    paths, _ = chart_of(text, "loss")
    assert points(paths[0, "dots"]) == [(500.0, 500.0)]
    charts = text.count('class="card chart')
    assert (
        charts
        == len(re.findall('class="dots"', text))
        == len(re.findall('<b class="value">', text))
    )


def test_a_run_that_only_evaluates_shows_its_loss(tmp_path):
    text = report_of(tmp_path, [], [(0, 1.5)], outcome="none")
    paths, _ = chart_of(text, "loss")
    assert points(paths[0, "dots"]) == [(500.0, 500.0)]
    assert "No step is finished yet" not in text


KEY = "0123456789abcdef" * 4


def found(right, wrong, **more):
    samples = [
        {"prompt": f"q{n}", "answer": f"<i>a{n}</i>", "expected": f"e{n}", "right": n >= wrong}
        for n in range(right + wrong)
    ]
    asked = right + wrong
    numbers = {"asked": asked, "right": right, "accuracy": right / asked, "skipped": 0}
    return {**numbers, "pattern": None, "samples": samples, **more}


def test_what_was_asked_after_training_is_in_the_page(tmp_path):
    report_of(tmp_path, falling(3), data={"val_set_size": 5})
    text = write_report(tmp_path).read_text()
    assert f"<code>penstock eval {tmp_path}</code>" in text
    write_held_out_results(tmp_path, KEY, found(60, 40))
    score = {"task": "arc", "metric": "acc,none", "value": 0.25, "stderr": 0.01}
    write_task_scores(tmp_path, KEY, [{**score, "value": 0.2}], None)
    write_task_scores(tmp_path, KEY, [score], 10)
    text = write_report(tmp_path).read_text()
    section = section_of(text, "Evaluation by generation")
    assert "60 of 100, 60.0%" in section
    assert "<td>4.9%</td>" in section  # the root of 0.6 x 0.4 / 100
    assert "&lt;i&gt;a0&lt;/i&gt;" in section
    assert "<p>e0</p>" in section
    assert re.findall("<td[^>]*>([^<]*)</td>", section)[-3:] == ["acc,none", "0.25", "0.01"]
    assert ">arc (first 10)<" in section
    assert "penstock eval" not in section
    page = Page(text)
    figures = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert figures["exact match"] == "60.0%"


@pytest.mark.parametrize("data", [{}, {"val_set_size": 5}, {"test_datasets": [{"path": "dummy"}]}])
def test_a_page_without_held_out_data_says_so(tmp_path, data):
    text = report_of(tmp_path, falling(3), data=data)
    assert ("Nothing was held out" in text) == (not data)


@pytest.mark.parametrize(("right", "wrong"), [(60, 40), (2, 40), (40, 1), (3, 3)])
def test_some_wrong_and_some_right_answers_are_kept(tmp_path, right, wrong):
    write_held_out_results(tmp_path, KEY, found(right, wrong))
    kept = read_json(tmp_path / EVAL_RESULTS)["held_out"]["samples"]
    assert len(kept) == min(right + wrong, MAX_COMPLETIONS)
    assert sum(each["right"] for each in kept) >= min(right, MAX_COMPLETIONS // 2)
    assert sum(not each["right"] for each in kept) >= min(wrong, MAX_COMPLETIONS // 2)


def test_long_answers_are_cut_and_results_of_another_run_are_passed_over(tmp_path):
    its = found(1, 0)
    its["samples"][0]["answer"] = "x" * 50_000 + " hf_abcdefghijklmnopqrstuvwxyz"
    write_held_out_results(tmp_path, "another", its)
    assert (tmp_path / EVAL_RESULTS).stat().st_size < 5_000
    text = report_of(tmp_path, falling(3))
    assert "Evaluation by generation" not in text
    write_task_scores(tmp_path, KEY, [], None)
    assert read_json(tmp_path / EVAL_RESULTS)["held_out"] is None


def test_a_layout_is_told_in_words_with_its_axes_of_several_ranks():
    assert layout_text({"mode": "fsdp2", "shard": 2, "tensor": 1}) == "mode fsdp2, shard 2"
    assert layout_text({"shard": 1}) == "one rank"
