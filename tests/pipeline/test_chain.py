"""The whole chain by the command: reuse, resume, waiting, and what failure says."""

import html
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from penstock.cli import train as by_hand
from penstock.evaluate import harness
from tests.cli.command import Said, penstock, penstock_alone
from tests.pipeline import runs
from tests.pipeline.runs import sealed, write_chats, write_run
from tests.ranks import on_ranks
from tests.stages.report.report_pages import section_of
from tests.turns import one_day_in
from tests.waiting import soon

pytestmark = pytest.mark.usefixtures("warm_ranks")

RUN = [sys.executable, "-m", "penstock.cli.main", "run"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One finished run: its folder, config and closing object."""
    folder = tmp_path_factory.mktemp("chain")
    config = write_run(folder)
    return folder, config, done_well("run", config).last


def done_well(*words: object) -> Said:
    """The command in this process, to an end without a fault."""
    said = penstock(*words, "--json")
    assert said.code == 0, said.err
    return said


def statuses(said: Said) -> dict[str, str]:
    """What became of each stage."""
    return {stage["stage"]: stage["status"] for stage in said.last["stages"]}


@pytest.mark.slow
def test_every_stage_runs_once_and_is_reused(done):
    _, config, first = done
    assert [stage["status"] for stage in first["stages"]] == ["ran"] * 4
    again = statuses(done_well("run", config))
    assert again == dict.fromkeys(("prepare", "pack", "train", "export"), "cached")
    one = statuses(done_well("pack", config))
    assert one == {"prepare": "cached", "pack": "cached"}


def test_a_run_ends_with_its_model_its_numbers_and_the_next_command(done):
    folder, config, first = done
    result, facts = first["result"], first["stages"][2]["facts"]
    assert (Path(result["model"]) / "config.json").is_file()
    assert result["report"] == str(folder / "out" / "report.html")
    records = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert result["first_loss"] == json.loads(records[0])["loss"] != result["final_loss"]
    assert {name: result[name] for name in facts} == facts
    assert result["next"] == f"penstock chat {config}"
    again = penstock("run", config, "--pipeline.name", "another name")
    for text in (result["model"], result["report"], f"{result['steps']} steps"):
        assert text in again.out
    assert f"penstock chat {config} --pipeline.name 'another name'" in again.out


def test_the_report_of_a_run_tells_of_its_data(done):
    folder, _, first = done
    facts = first["stages"][0]["facts"]
    page = (folder / "out" / "report.html").read_text()
    section = section_of(page, "Data")
    share = facts["trained_tokens"]["train"] / facts["tokens"]["train"]
    assert f"<td>{facts['rows']['train']}</td>" in section
    assert f"{share:.1%} trained on" in section
    assert ">chats.jsonl<" in section
    assert len(re.findall(r"<mark>\d+&lt;\|im_end\|&gt;", section)) == 3
    lineage = section_of(page, "Lineage")
    assert lineage.count("built for this run") == 2  # what was prepared, and what was packed


@pytest.mark.slow
def test_what_eval_finds_is_in_the_page_and_the_run_stays_sealed(done, monkeypatch):
    folder, config, _ = done
    out = folder / "out"
    before = (out / "manifest.json").read_bytes()
    assert f"<code>penstock eval {out}</code>" in (out / "report.html").read_text()
    told = done_well("eval", out).last
    page = (out / "report.html").read_text()
    section = section_of(page, "Evaluation by generation")
    assert f"{told['right']} of {told['asked']}, {told['accuracy']:.1%}" in section
    for sample in told["samples"]:
        assert html.escape(sample["prompt"].strip(), quote=False) in section
        assert html.escape(sample["answer"].strip()) in section
    scores = [harness.Score("arc", "acc,none", 0.25, 0.125)]
    monkeypatch.setattr(harness, "run_tasks", lambda *_, **__: scores)
    done_well("eval", out, "--harness", "arc")
    page = (out / "report.html").read_text()
    assert f"{told['right']} of {told['asked']}, {told['accuracy']:.1%}" in page
    assert ">0.125<" in section_of(page, "Evaluation by generation")
    assert (out / "manifest.json").read_bytes() == before
    again = statuses(done_well("run", config, "--pipeline.verify", "always"))
    assert set(again.values()) == {"cached"}


def test_a_finished_pipeline_needs_no_heavy_library(done):
    _, config, _ = done
    code = (
        "import sys\n"
        "from penstock.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'prefect', 'datasets', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, "run", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_an_output_folder_of_another_run_is_refused_until_moved_aside(done, tmp_path):
    folder, config, _ = done
    shutil.copytree(folder / "out", tmp_path / "out")
    words = (config, "--train.lr", "0.5", "--train.output_dir", tmp_path / "out")
    refused = penstock("train", *words)
    assert refused.code == 2
    assert "train.lr: 0.5 here, 0.01 there" in refused.err
    assert "--fresh" in refused.err
    assert "Traceback" not in refused.err
    seen = statuses(done_well("run", *words, "--fresh"))
    # Another learning rate is of no concern to the data.
    assert seen == {"prepare": "cached", "pack": "cached", "train": "ran", "export": "ran"}
    assert (tmp_path / "out.old-1" / "manifest.json").is_file()


@pytest.mark.slow
def test_forcing_a_stage_builds_it_again_to_the_same_bytes(done):
    folder, config, _ = done
    before = sealed(folder)
    seen = statuses(done_well("run", config, "--from", "pack"))
    assert seen == {"prepare": "cached", "pack": "ran", "train": "ran", "export": "ran"}
    after = {n: m for n, m in sealed(folder).items() if ".old-" not in n}
    assert after == before


@one_day_in(3, of=2)
@pytest.mark.dist
def test_two_runs_at_once_do_the_work_once(tmp_path):
    both = on_ranks(2, penstock_alone, "run", write_run(tmp_path), "--json", timeout=240)
    assert [said.code for said in both] == [0, 0], both
    for name in ("prepare", "pack", "train", "export"):
        assert sorted(statuses(said)[name] for said in both) == ["cached", "ran"], name
    assert any("waiting" in said.err for said in both)
    done_well("artifacts", "verify", "--root", tmp_path)


@pytest.mark.exhaustive
def test_kill_9_at_random_moments_leaves_the_bytes_of_an_undisturbed_run(tmp_path):
    write_chats(tmp_path / "chats.jsonl", 400)
    sections = {
        "data": {"datasets": datasets(tmp_path), "val_set_size": 8},
        "train": {"num_train_epochs": 3},
    }
    calm, wild = (write_run(tmp_path / name, **sections) for name in ("calm", "wild"))
    runs.penstock("run", calm)
    chance = random.Random(3)
    for begun, within in MOMENTS:
        before = steps_of(tmp_path / "wild") if begun == "a step" else 0
        process = subprocess.Popen(
            [*RUN, str(wild)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not there(tmp_path / "wild", begun, before):
            assert process.poll() is None, f"it ended before {begun}"
            time.sleep(0.005)
        time.sleep(within * chance.random())
        if chance.random() < 0.5:  # everything dies at once, else the ranks may still save
            subprocess.run(["pkill", "-9", "-f", str(tmp_path / "wild")], check=False)
        process.send_signal(signal.SIGKILL)
        process.wait()
        sealed(tmp_path / "wild")  # whatever is sealed is whole
    runs.penstock("run", wild)
    assert sealed(tmp_path / "wild") == sealed(tmp_path / "calm")
    done_well("artifacts", "verify", "--root", tmp_path / "wild")


MOMENTS = (
    ("prepared/prepare/*", 0.1),
    ("prepared/prepare/*", 1.5),
    ("prepared/pack/*/manifest.json", 5.0),
    ("a step", 0.5),
    ("a step", 1.0),
)
"""What must be there, and the most seconds after it, of which chance takes some."""


def there(folder, begun, before):
    if begun == "a step":
        return steps_of(folder) > before
    return any(folder.glob(begun))


def steps_of(folder):
    metrics = folder / "out" / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


@one_day_in(2, of=0)
@pytest.mark.dist
def test_a_signal_and_a_file_end_training_with_a_checkpoint_saved_and_no_process_left(tmp_path):
    write_chats(tmp_path / "chats.jsonl", 400)
    config, out = write_run(tmp_path, train={"num_train_epochs": 400}), tmp_path / "out"

    def saved():
        steps = [json.loads(s)["step"] for s in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))
        assert (out / "checkpoints" / f"global_step_{steps[-1]}" / "COMPLETE").is_file()
        return len(steps)

    process = subprocess.Popen(
        [*RUN, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    soon(lambda: steps_of(tmp_path))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    before = saved()
    (out / "STOP").touch()  # of no concern to a start that comes after it
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(on_ranks, 1, by_hand.main, [str(config)])
        soon(lambda: steps_of(tmp_path) > before)
        (out / "STOP").touch()
        assert rank.result() == [143]
    assert saved() > before
    alive = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False)
    assert alive.stdout == b""


def datasets(folder):
    return [{"path": str(folder / "chats.jsonl"), "type": "chat"}]


def spoil_json(folder):
    file = folder / "chats.jsonl"
    lines = file.read_text().splitlines()
    lines[6] = lines[6][:20]
    file.write_text("\n".join(lines) + "\n")


def cut_parquet(folder):
    table = pa.table({"text": ["hello"] * 1000})
    pq.write_table(table, folder / "cut.parquet")
    content = (folder / "cut.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])


def replaced(path, **more):
    return {"data": {"datasets": [{"path": path, "type": "chat", **more}]}}


BAD = {
    "a missing file": (
        lambda f: replaced(f"{f}/chat.jsonl"),
        None,
        2,
        ["chat.jsonl", "chats.jsonl"],
    ),
    "an empty file": (
        lambda f: replaced(f"{f}/empty.jsonl"),
        lambda f: (f / "empty.jsonl").touch(),
        1,
        ["empty.jsonl"],
    ),
    "a truncated parquet": (
        lambda f: replaced(f"{f}/cut.parquet"),
        cut_parquet,
        1,
        ["cut.parquet"],
    ),
    "invalid JSON": (lambda _: {}, spoil_json, 1, ["chats.jsonl:7"]),
    "a missing column": (
        lambda f: replaced(f"{f}/chats.jsonl", field_messages="message"),
        None,
        1,
        ["message", "messages"],
    ),
    "a wrong type": (lambda _: {"train": {"lr": "fast"}}, None, 2, ["train.lr", "fast"]),
    "an unknown key": (lambda _: {"train": {"max_step": 3}}, None, 2, ["max_step", "max_steps"]),
    "a hub id offline": (lambda _: replaced("nobody/nothing"), None, 3, ["nobody/nothing"]),
    "an unwritable path": (
        lambda f: {"data": {"dataset_prepared_path": f"{f}/chats.jsonl/prepared"}},
        None,
        2,
        ["chats.jsonl is a file"],
    ),
    "too long for a row": (
        lambda _: {"data": {"sample_packing_sequence_len": 128, "pad_to_multiple_of": 8}},
        lambda f: write_chats(f / "chats.jsonl", salt=" " * 300),
        1,
        ["sample_packing_sequence_len", "max_seq_len"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_clear_message_and_harms_nothing(what, done, tmp_path):
    folder, _, _ = done
    before = sealed(folder)
    write_chats(tmp_path / "chats.jsonl")
    sections, spoil, code, named = BAD[what]
    if spoil:
        spoil(tmp_path)
    run = yaml.safe_load(write_run(tmp_path).read_text())
    run["data"]["dataset_prepared_path"] = str(folder / "prepared")
    for name, values in sections(tmp_path).items():
        run[name] = {**run[name], **values}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    failed = penstock("run", tmp_path / "run.yaml")
    assert failed.code == code
    for name in named:
        assert name in failed.err
    assert "Traceback" not in failed.err
    assert failed.err.count("error:") <= 1
    after = sealed(folder)
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_a_run_that_resumes(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        write_chats(tmp_path / "chats.jsonl", 2000)
        config = write_run(
            tmp_path,
            data={"datasets": datasets(tmp_path), "dataset_prepared_path": str(small / "p")},
        )
        failed = penstock("prepare", config)
        assert failed.code == 1
        assert "disk is full" in failed.err
        assert "Traceback" not in failed.err
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        assert statuses(done_well("prepare", config)) == {"prepare": "resumed"}
        done_well("artifacts", "verify", "--root", small)
    finally:
        subprocess.run(["umount", str(small)], check=False)
