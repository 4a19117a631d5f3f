import json

import pytest
import typer

from penstock import __version__
from penstock.cli.main import app
from penstock.core import env
from tests.cli.command import penstock, small_run


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def test_the_last_line_with_json_is_one_object_and_alone_on_stdout(config):
    said = penstock("pack", config, "--json")
    assert said.code == 0
    assert len(said.out.splitlines()) == 1
    assert said.last["ok"] is True
    assert said.last["error"] is None
    assert [(s["stage"], s["status"]) for s in said.last["stages"]] == [
        ("prepare", "ran"),
        ("pack", "ran"),
    ]
    assert said.last["stages"][0]["facts"]["rows"]
    again = penstock("pack", config, "--json")
    assert [s["status"] for s in again.last["stages"]] == ["cached", "cached"]


def test_without_json_results_are_on_stdout_and_the_way_there_on_stderr(config):
    said = penstock("prepare", config)
    assert said.code == 0
    assert said.out.splitlines()[0].split() == ["stage", "key", "status", "seconds", "where"]
    assert "prepare: ran in" in said.err


@pytest.mark.parametrize("place", ["before", "after", "with equals"])
def test_overrides_may_stand_anywhere(config, place):
    argv = {
        "before": ["check", "--train.lr", "2e-5", config, "--json"],
        "after": ["check", config, "--json", "--train.lr", "2e-5"],
        "with equals": ["check", config, "--train.lr=2e-5", "--json"],
    }[place]
    assert penstock(*argv).last["config"]["train"]["lr"] == 2e-5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["run", "CONFIG", "--train.learning_rate", "1"], "learning_rate: unknown"),
        (["run", "CONFIG", "--force", "bake"], "bake is not a stage"),
        (["run", "CONFIG", "--no-such-option"], "has no option --no-such-option"),
        (["run", "CONFIG", "--lr", "1e-5"], "did you mean --train.lr?"),
        (["run", "CONFIG", "--learning-rate", "1e-5"], "did you mean --train.lr?"),
        (["run", "CONFIG", "--fresk"], "--fresh"),
        (["run", "--config", "CONFIG"], "give the file without an option"),
        (["run", "CONFIG", "--launch.nproc", "2"], "did you mean nproc_per_node?"),
        (["rnu", "CONFIG"], "Did you mean 'run'?"),
        (["run"], "Missing argument 'CONFIG'"),
        (["pack", "CONFIG", "--fresh"], "no option --fresh"),
        (["push", "CONFIG", "--dry-run"], "push has nowhere to go"),
        (["push", "CONFIG"], "push has nowhere to go"),
        (["report", "CONFIG"], "contains no training run"),
        (["artifacts", "show", "feed", "--root", "nowhere"], "nowhere is not a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_the_user_got_wrong_exits_with_2_and_a_message(config, argv, words):
    said = penstock(*[config if each == "CONFIG" else each for each in argv])
    assert said.code == 2
    assert words in said.err
    assert said.err.startswith("error: ")
    assert said.out == ""
    assert "Traceback" not in said.err


def test_what_the_parser_refuses_is_told_as_json_too():
    said = penstock("run", "CONFIG", "--lr", "1e-5", "--json")
    assert said.code == 2
    assert said.last["ok"] is False
    assert "did you mean --train.lr?" in said.last["error"]["message"]


def test_version_is_said_and_completion_is_offered(monkeypatch):
    assert penstock("--version").out.strip() == __version__
    # The shell that typer looks for among this process's parents; continuous integration has none.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert "_PENSTOCK_COMPLETE" in penstock("--show-completion").out
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "penstock pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "prepare" in penstock().out


def test_a_dry_run_builds_nothing(config, tmp_path):
    said = penstock("run", config, "--dry-run", "--json")
    assert said.code == 0
    assert {verdict["standing"] for verdict in said.last["plan"]} == {"missing"}
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "out").exists()


def test_a_failed_stage_exits_with_1_and_a_traceback_only_on_request(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "whole"}\n{"text": "cut off\n')
    said = penstock("prepare", config, "--json")
    assert said.code == 1
    assert said.last["ok"] is False
    assert said.last["error"]["exit_code"] == 1
    assert "rows.jsonl" in said.last["error"]["message"]
    assert said.last["error"]["message"] in said.err
    assert "Traceback" not in said.err
    assert "Traceback" in penstock("prepare", config, "--debug").err


def test_a_missing_capability_exits_with_3(config):
    if env.num_gpus():
        pytest.skip("this machine has what is asked for")
    said = penstock("run", config, "--model.attn_implementation", "native")
    assert said.code == 3
    assert "needs a CUDA device" in said.err


def test_no_upstream_says_what_is_missing_and_builds_nothing(config, tmp_path):
    said = penstock("pack", config, "--no-upstream")
    assert said.code == 1
    assert "pack needs prepare" in said.err
    assert not (tmp_path / "data" / "prepare").exists()


def test_force_builds_one_stage_again_and_from_all_after_it(config):
    penstock("pack", config)
    forced = penstock("pack", config, "--force", "prepare", "--json").last["stages"]
    assert [s["status"] for s in forced] == ["ran", "cached"]
    started = penstock("pack", config, "--from", "prepare", "--json").last["stages"]
    assert [s["status"] for s in started] == ["ran", "ran"]
    assert [s["key"] for s in started] == [s["key"] for s in forced]


def test_the_schema_is_json_and_knows_every_section():
    said = penstock("schema")
    assert said.code == 0
    assert {"model", "data", "train", "lora", "export", "push"} <= json.loads(said.out)[
        "properties"
    ].keys()


def test_another_runs_folder_is_moved_aside_only_by_commands_that_may_train():
    commands = typer.main.get_group(app).commands
    offered = {
        name for name, one in commands.items() if any("--fresh" in p.opts for p in one.params)
    }
    assert offered == {"run", "train", "export", "push"}


@pytest.mark.parametrize(
    "words",
    [
        ("run", "nowhere.yaml"),
        ("train", "CONFIG", "--train.lrr", "3", "--train.max_stepss", "3"),
        # On a CPU without units for bfloat16 a note about it comes first.
        ("export", "CONFIG", "--no-upstream", "--train.enable_mixed_precision", "false"),
        ("run", "CONFIG", "--force", "nothing"),
        ("run",),
        ("nothing",),
        ("plan", "CONFIG", "--nothing"),
        ("check", "FOLDER"),
        ("chat", "FOLDER"),
        ("eval", "FOLDER"),
        ("report", "FOLDER"),
        ("artifacts", "show", "nothing"),
        ("data", "show", "nowhere.yaml"),
        ("translate", "nowhere.yaml"),
        ("init", "nothing"),
    ],
)
def test_every_fault_begins_with_error_once(words, config):
    named = {"CONFIG": config, "FOLDER": config.parent}
    said = penstock(*(named.get(word, word) for word in words))
    assert said.code
    assert said.err.startswith("error: ")
    assert said.err.count("error: ") == 1
