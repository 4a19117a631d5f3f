"""What people get wrong in commands: each is told in words they can act on, and ends at once."""

from pathlib import Path

import pytest

from penstock.core import env
from tests.cli.command import penstock, small_run, told

COMMANDS: dict[str, tuple[str, str]] = {
    "a misspelt command": ("trian run.yaml", "Did you mean 'train'?"),
    "no command": ("run.yaml", "write penstock run run.yaml"),
    "no config": ("run", "Missing argument 'CONFIG'"),
    "a folder": ("run .", ". is a folder with run.yaml"),
    "a misspelt file": ("run rnu.yaml", "did you mean run.yaml?"),
    "data for a config": ("run rows.jsonl", "penstock init rows.jsonl"),
    "a stage that is none": ("run run.yaml --force trian", "trian is not a stage"),
    "a word for all stages": ("run run.yaml --from all", "Stages are prepare, encode, pack"),
    "an option without its value": ("run run.yaml --force", "requires an argument"),
    "nothing to read": ("train run.yaml --no-upstream", "run penstock prepare first"),
    "a share too many": ("prepare run.yaml --shard 3/2", "Write --shard 1/2"),
    "no share": ("prepare run.yaml --shard x", "Write --shard 2/4"),
    "evaluation of nothing": ("eval nowhere", "nowhere does not exist"),
    "evaluation of no run": ("eval dd", "neither a run nor a model"),
    "evaluation without prompts": ("eval run.yaml", "Write data.val_set_size"),
    "a chat with nobody": ("chat nowhere", "nowhere is neither a path here nor"),
    "a chat with a folder": ("chat dd", "neither a run nor a model"),
    "a chat before training": ("chat run.yaml", "Run penstock run first"),
    "a report of nothing": ("report nowhere", "Name a train.output_dir"),
    "a report of no run": ("report dd", "it has no job.json"),
    "a report of a config": ("report run.yaml", "Name a train.output_dir"),
    "a result that is none": ("artifacts show dd", "See penstock artifacts list"),
    "a command of shells": ("artifacts ls", "Did you mean 'list'?"),
    "records of a file": ("data show rows.jsonl", "is data, and a config is YAML"),
    "a merge of nothing": ("merge nowhere dd -o o", "nowhere is neither a path here nor"),
    "a merge without a place": ("merge a b", "Missing option '-o'"),
    "a run to be served": ("serve run.yaml", "run.yaml is no server's file"),
    "no server": ("serve", "Missing argument 'CONFIG'"),
    "a server to be run": ("run server.yaml", "penstock serve server.yaml serves it"),
    "a dialect that is none": ("translate run.yaml --dialect axolotle", "did you mean axolotl?"),
    "a recipe that is none": ("init nothing", "Recipes are quickstart"),
    "data that are not there": ("init nowhere.jsonl", "nowhere.jsonl does not exist"),
    "a config for data": ("init run.yaml", "is a config already"),
    "a config that is there": ("init rows.jsonl", "run.yaml exists already"),
    "a way to launch that is none": ("launch run.yaml foo --print", "Write one of torchrun"),
    "a way without a look": ("launch run.yaml slurm", "Add --print"),
    "GPUs nobody counted": ("launch run.yaml --print kubernetes", "Add --launch.nproc_per_node"),
    "no devices": ("plan run.yaml --devices 0", "greater than or equal to 1"),
    "a device nobody knows": ("plan run.yaml --device-kind H2000", "Known are a10"),
    "releases of none": ("releases list run.yaml", "Write it, for example release:"),
    "recurring without a release": ("recur run.yaml", "Write it, for example release:"),
    "a word too many": ("doctor run.yaml", "unexpected extra argument"),
    "an option of another command": ("check run.yaml --fresh", "has no option --fresh"),
    "more processes than copies": (
        "run run.yaml --launch.nproc_per_node 8",
        "Or write launch.nproc_per_node: 1",
    ),
    "a folder nobody writes to": ("run run.yaml --train.output_dir /proc/x", "cannot be written"),
    "a variable that is not set": ("run run.yaml --train.output_dir $NO_SUCH/x", "NO_SUCH"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dd").mkdir()
    (tmp_path / "server.yaml").write_text("model_path: Qwen/Qwen3-8B\nenable_lora: true\n")


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_is_told_and_leaves_nothing_behind(mistake, tmp_path):
    small_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words, expected = COMMANDS[mistake]
    said = penstock(*words.split())
    told(said.code, said.err, expected)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_is_told_as_json_too(mistake, tmp_path):
    words, expected = COMMANDS[mistake]
    if any(words.startswith(name) for name in ("run run.yaml --force", "serve")):
        return
    small_run(tmp_path)
    said = penstock(*words.split(), "--json")
    assert not said.last["ok"]
    assert expected in said.last["error"]["message"]


def test_a_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    said = penstock("check", small_run(tmp_path, train={"output_dir": "~/out"}), "--json")
    assert said.last["config"]["train"]["output_dir"] == str(tmp_path / "home" / "out")


def test_a_run_that_ends_on_the_hub_asks_for_a_login_first(tmp_path, monkeypatch):
    monkeypatch.setattr(env, "hub_is_offline", lambda: False)
    monkeypatch.setattr(env, "hub_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    config = small_run(tmp_path, push={"repo_id": "me/x"})
    for command in ("check", "run"):
        said = penstock(command, config)
        told(said.code, said.err, "push.repo_id: me/x needs a login" * (command == "run"))
        assert "`hf auth login`, or set HF_TOKEN" in said.err
    assert not (tmp_path / "data").exists()


def test_a_plan_tells_of_folders_that_a_run_could_not_write_to(tmp_path):
    said = penstock("plan", small_run(tmp_path, data={"dataset_prepared_path": "server.yaml"}))
    assert said.code == 0
    assert "warning: data.dataset_prepared_path server.yaml cannot be written to" in said.err
