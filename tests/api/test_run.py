"""A run in Python: it makes and reuses what the command does, and gives back what was made."""

import asyncio
import contextlib
import html
import io
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import penstock as ps
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import IGNORED
from tests.cli.command import penstock, small_run
from tests.pipeline.runs import write_run
from tests.turns import one_day_in

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that was run in Python, its results, and the lines that were said."""
    config, said = write_run(tmp_path_factory.mktemp("api")), []
    run = ps.load(config, notify=said.append)
    with contextlib.redirect_stderr(io.StringIO()) as shown:  # like a notebook's, without bytes
        results = run.run()
    assert "step=1 " in shown.getvalue()
    return config, run, results, said


def keys(stages):
    return {stage["stage"]: stage["key"] for stage in stages}


@pytest.mark.slow
def test_the_command_finds_every_stage_done_under_the_same_key(done):
    config, run, results, said = done
    assert list(results) == list(run.stages) == ["prepare", "pack", "train", "export"]
    assert {result.status for result in results.values()} == {"ran"}
    told = penstock("run", config, "--json").last["stages"]
    assert {stage["status"] for stage in told} == {"cached"}
    assert keys(told) == {name: result.key for name, result in results.items()}
    assert [stage["facts"] for stage in told] == [result.facts for result in results.values()]
    assert [line.partition(":")[0] for line in said if ": ran in" in line] == list(results)


def test_what_the_command_has_made_is_found_done(tmp_path):
    config = small_run(tmp_path)
    made = keys(penstock("pack", config, "--data.val_set_size", 2, "--json").last["stages"])
    run = ps.load(config, data={"val_set_size": 2})
    packed = run.pack()
    assert packed.status == "cached"
    assert packed.key == made["pack"]
    assert run.status() == {
        "prepare": "cached",
        "pack": "cached",
        "train": "missing",
        "export": "missing",
    }
    assert ps.load(config).status()["prepare"] == "missing"


def test_a_plan_says_what_the_command_says(done):
    config = done[0]
    run = ps.load(config, data={"sample_packing_sequence_len": 128})
    told = penstock("plan", config, "--data.sample_packing_sequence_len", 128)
    text = repr(run.plan())
    assert text in told.out
    assert "sample_packing_sequence_len: 128 here, 256 there" in text
    page = run.plan()._repr_html_()
    for stage in run.plan().stages:
        assert f"<td>{stage.key}</td><td>{stage.standing}</td>" in page
        assert all(html.escape(line) in page for line in stage.reasons)
    assert ps.load(config).plan().stages[0].standing == "cached"


def test_prepared_samples_are_a_dataset_of_what_is_on_disk(done):
    prepared = done[1].prepare()
    assert isinstance(prepared, ps.PreparedData)
    for split, count in prepared.facts["rows"].items():
        found, stored = prepared.dataset(split), PreparedSamples(prepared.path, split)
        assert isinstance(found, datasets.Dataset)
        assert len(found) == count > 0
        for index in range(count):
            ids, labels = stored.sample(index).sides[""]
            assert found[index]["input_ids"] == ids.tolist()
            assert found[index]["labels"] == labels.tolist()
        assert set(found["source"]) == {"chats.jsonl"}
    mapped = prepared.dataset().map(lambda sample: {"length": len(sample["input_ids"])})
    stored = PreparedSamples(prepared.path, "train")
    assert list(mapped["length"]) == stored.lengths().tolist()


def test_packed_rows_are_what_the_trainer_reads_and_a_dataset(done):
    packed = done[1].pack()
    rows, found = packed.rows(), packed.dataset()
    assert len(rows) == len(found) == packed.facts["rows"]["train"]
    for index, row in enumerate(found):
        np.testing.assert_array_equal(rows.row(index).input_ids, row["input_ids"])
        assert sum(row["lengths"]) == len(row["input_ids"]) == len(row["labels"])
    trained = sum(label != IGNORED for row in found for label in row["labels"])
    assert trained == packed.facts["trained_tokens"]["train"]


def test_a_split_that_is_not_there_is_refused(tmp_path):
    run = ps.load(small_run(tmp_path))
    with pytest.raises(ps.ConfigError, match="validation split has no rows"):
        run.pack().rows("validation")
    with pytest.raises(ps.ConfigError, match="'test' is no split"):
        run.prepare().dataset("test")  # pyright: ignore[reportArgumentType]


def test_the_report_holds_the_numbers_of_the_run(done):
    _, run, results, _ = done
    report, trained = run.report, results["train"]
    assert isinstance(trained, ps.Training)
    assert report.path == trained.report
    assert report.metrics == trained.metrics
    losses = [record["loss"] for record in report.metrics if "loss" in record]
    assert len(losses) == report.figures["steps"] == trained.facts["steps"]
    assert report.figures["first_loss"] == losses[0]
    assert report.figures["final_loss"] == losses[-1]
    assert report.path.as_uri() in report._repr_html_()
    assert f"final_loss={losses[-1]:.6g}" in repr(report)
    for change in ({"output_dir": str(trained.path / "other")}, {"lr": 0.5}):  # another run
        other = ps.load(run.config, train=change).report
        assert (other.path, other.figures, other.metrics) == (None, {}, [])


def test_the_model_is_the_exported_one(done):
    _, run, results, _ = done
    model, tokenizer = run.model()
    theirs = AutoModelForCausalLM.from_pretrained(results["export"].folder, dtype="auto")
    ids = tokenizer("What is 3 doubled?", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
    assert not model.training
    assert run.model(dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    with pytest.raises(ps.ConfigError, match="trains no adapter"):
        run.model(adapter="peft")


def test_a_model_that_is_not_exported_is_not_trained_on_the_way(tmp_path):
    with pytest.raises(ps.StageError, match="Call run"):
        ps.load(small_run(tmp_path)).model()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_adapter_is_merged_or_laid_over_its_base_and_says_the_same(tmp_path, merge):
    run = ps.load(
        write_run(tmp_path),
        train={"num_train_epochs": 1},
        lora={"enable_lora": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]},
        export={"merge_lora": merge},
        notify=lambda _: None,
    )
    run.run()
    merged, tokenizer = run.model(adapter="merged")
    laid, _ = run.model(adapter="peft")
    assert isinstance(laid, PeftModel)
    assert not isinstance(merged, PeftModel)
    assert isinstance(run.model()[0], PeftModel) is not merge
    ids = tokenizer("What is 3 doubled?", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(laid(ids).logits, merged(ids).logits)
        with laid.disable_adapter():
            assert not torch.allclose(laid(ids).logits, merged(ids).logits, atol=1e-4)


def test_forcing_builds_again_and_names_that_are_no_stages_are_refused(tmp_path):
    run = ps.load(small_run(tmp_path), notify=lambda _: None)
    assert [run.prepare().status, run.prepare().status] == ["ran", "cached"]
    again = run.prepare(force=True)
    assert again.status == "ran"
    assert run.pack().status == "ran"
    wishes: list[dict[str, Any]] = [{"force": "pakc"}, {"force": ["pakc"]}, {"start": "pakc"}]
    for wish in wishes:
        with pytest.raises(ps.ConfigError, match=r"pakc is not a stage"):
            run.run(**wish)
    with pytest.raises(ps.ConfigError, match="push has nowhere to go"):
        run.push()


@pytest.mark.parametrize("merge", [True, False])
def test_a_dry_run_of_push_says_what_it_would_send_and_builds_nothing(tmp_path, merge):
    adapter = {"enable_lora": True, "lora_rank": 2}
    push, export = {"url": f"file://{tmp_path}/there", "dry_run": True}, {"merge_lora": merge}
    config = small_run(tmp_path, push=push, export=export, lora=adapter)
    before, said = sorted(tmp_path.rglob("*")), []
    pushed = ps.load(config, notify=said.append).push()
    assert sorted(tmp_path.rglob("*")) == before
    assert (pushed.status, pushed.facts["files"]) == ("skipped", [])
    assert pushed.facts["missing"] == ["prepare", "pack", "train", "export"]
    model_at = {"hf": "", "adapter": "adapter"} if merge else {"adapter": ""}
    assert pushed.facts["folders"] == model_at
    assert len([line for line in said if "would send" in line]) == len(model_at)
    refused = penstock("push", config, "--from", "train")
    assert refused.code == 2
    assert "push.dry_run builds nothing, and train" in refused.err


def test_a_dry_run_of_push_lists_the_files_of_an_export_that_is_there(done, tmp_path):
    config, _, results, _ = done
    before = {path: path.stat().st_mtime_ns for path in results["train"].path.rglob("*")}
    there = f"file://{tmp_path}/there"
    pushed = ps.load(config, notify=lambda _: None, push={"url": there, "dry_run": True}).push()
    exported = results["export"].path / "hf"
    names = sorted(file.relative_to(exported).as_posix() for file in exported.rglob("*"))
    assert [file["path"] for file in pushed.facts["files"]] == names
    assert before == {path: path.stat().st_mtime_ns for path in results["train"].path.rglob("*")}
    assert not (tmp_path / "there").exists()


def test_damage_is_told_as_on_the_command_line(tmp_path):
    config = small_run(tmp_path)
    run = ps.load(config, notify=lambda _: None)
    prepared = run.prepare()
    [file] = (prepared.path / "data" / "train").glob("*.arrow")
    file.write_bytes(b"other")
    with pytest.raises(ps.ArtifactError) as raised:
        run.pack()
    assert str(raised.value) in penstock("pack", config).err


def test_stages_run_inside_a_running_event_loop(tmp_path):
    run = ps.load(small_run(tmp_path), notify=lambda _: None)

    async def cell():
        here = run.prepare()
        elsewhere = await asyncio.to_thread(run.pack)
        return here.status, elsewhere.status

    assert asyncio.run(cell()) == ("ran", "ran")


def test_time_limits_are_refused_before_work_in_a_thread_that_cannot_keep_them(tmp_path):
    run = ps.load(small_run(tmp_path), pipeline={"timeouts": {"prepare": 60.0}})
    failures = []

    def attempt():
        try:
            run.prepare()
        except ps.ConfigError as error:
            failures.append(str(error))

    thread = threading.Thread(target=attempt, name="a worker")
    thread.start()
    thread.join()
    assert "pipeline.timeouts cannot be kept in the thread a worker" in failures[0]
    assert not (tmp_path / "data").exists()


SCRIPT = """
import sys
import penstock as ps
from penstock.pack import spread
from penstock.prepare import workers

print("begins")
workers.MIN_BYTES_PER_PROCESS = spread.MIN_TOKENS_PER_PROCESS = 1
run = ps.load(sys.argv[1], "data.dataset_num_proc=2", "data.num_dataset_shards_to_save=2")
again = {"path": sys.argv[2], "type": "chat"}
run = ps.load(run.config, {"data.datasets.1": again})
print(run.pack().status)
"""


@one_day_in(3, of=1)
def test_a_script_without_a_main_guard_is_run_once_however_many_processes_work(tmp_path):
    config = write_run(tmp_path / "a")
    write_run(tmp_path / "b", data={"dataset_prepared_path": str(tmp_path / "b")})
    more = tmp_path / "b" / "chats.jsonl"
    more.write_text(more.read_text().replace("doubled", "tripled"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, config, more]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert ran.stdout.split() == ["begins", "ran"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_interrupt_saves_a_checkpoint_and_the_same_call_goes_on(tmp_path):
    config = write_run(tmp_path, train={"num_train_epochs": 60, "save_steps": 1000})
    code = f"import penstock; penstock.load({str(config)!r}).train()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT  # as Python ends after KeyboardInterrupt
    assert "interrupted; the same call resumes" in told
    run = ps.load(config, notify=lambda _: None)
    assert run.status()["train"] == "partial"
    steps = [record["step"] for record in run.report.metrics if "loss" in record]
    assert run.report.figures == {}
    resumed = run.train()
    assert resumed.status == "resumed"
    after = [record["step"] for record in resumed.metrics if "loss" in record]
    assert after == list(range(1, resumed.facts["steps"] + 1))
    assert max(steps) >= 3


@pytest.mark.exhaustive
@pytest.mark.dist
def test_two_ranks_train_what_one_does(done, tmp_path):
    _, run, results, _ = done
    two = ps.load(
        run.config,
        train={"output_dir": str(tmp_path / "out"), "data_parallel_mode": "ddp"},
        launch={"nproc_per_node": 2},
        notify=lambda _: None,
    )
    one = ps.load(
        two.config,
        train={"output_dir": str(tmp_path / "one"), "global_batch_size": 2},
        launch={"nproc_per_node": 1},
        notify=lambda _: None,
    )
    losses = [each.train().facts["final_loss"] for each in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert two.prepare().status == two.pack().status == "cached"
    assert results["pack"].key == two.pack().key
