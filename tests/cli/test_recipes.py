import json

import pytest
import yaml

from penstock.cli.init.recipes import (
    SCHEMA_FILE,
    SERVER_PREFIX,
    SERVER_SCHEMA_FILE,
    recipes,
    summary,
)
from penstock.config.loading.load import load
from penstock.config.server.load import load_server
from tests.cli.command import penstock
from tests.conftest import ROOT

SERVERS = [name for name in recipes() if name.startswith(SERVER_PREFIX)]
NAMES = [name for name in recipes() if name not in SERVERS]
FOLDERS = ("examples", "recipes")
CONFIGS = sorted(
    path for folder in ("", *FOLDERS) for path in ROOT.glob(f"configs/{folder}/*.yaml")
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_accepted_and_tells_editors_its_schema(path):
    load(path)
    modeline = path.read_text().splitlines()[0]
    schema = modeline.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).resolve() == ROOT / "configs" / "schema.json"


def test_the_package_ships_the_recipes_of_the_repository():
    files = (sorted(ROOT.glob(f"configs/{folder}/*.yaml")) for folder in FOLDERS)
    assert ["quickstart", *(path.stem for folder in files for path in folder)] == NAMES
    assert {"chat", "lora", "gsm8k", "local", "tokenized"} <= set(NAMES)
    servers = sorted(f"{SERVER_PREFIX}{path.stem}" for path in ROOT.glob("configs/server/*.yaml"))
    assert servers == SERVERS


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_recipe_means_the_same_and_is_not_overwritten(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert penstock("init", name).out.strip() == f"{name}.yaml"
    copy = tmp_path / f"{name}.yaml"
    [shipped] = [path for path in CONFIGS if path.stem == name]
    assert load(copy) == load(shipped)
    assert copy.read_text().splitlines()[0].endswith(f"$schema=./{SCHEMA_FILE}")
    assert "properties" in json.loads((tmp_path / SCHEMA_FILE).read_text())
    copy.write_text("# mine\n")
    again = penstock("init", name)
    assert again.code == 2
    assert "exists already" in again.err
    assert copy.read_text() == "# mine\n"


@pytest.mark.parametrize("name", SERVERS)
def test_a_copied_servers_file_means_the_same_and_says_how_it_is_served(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    said = penstock("init", name)
    assert f"then penstock serve {name}.yaml" in said.err
    copy = tmp_path / f"{name}.yaml"
    shipped = ROOT / "configs" / "server" / f"{name.removeprefix(SERVER_PREFIX)}.yaml"
    assert load_server(copy) == load_server(shipped)
    assert copy.read_text().splitlines()[0].endswith(f"$schema=./{SERVER_SCHEMA_FILE}")
    assert "lora_rank" in json.loads((tmp_path / SERVER_SCHEMA_FILE).read_text())["properties"]


def test_list_names_every_recipe_and_what_it_is_for():
    listed = penstock("init", "--list").out
    for name, file in recipes().items():
        assert name in listed
        assert summary(file) in listed
        assert len(summary(file)) > 20


def test_an_unknown_recipe_is_told_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = penstock("init", "../../etc/passwd")
    assert said.code == 2
    assert all(name in said.err for name in NAMES)
    assert list(tmp_path.iterdir()) == []


def test_what_check_prints_runs_as_it_is(tmp_path):
    printed = penstock("check", ROOT / "configs" / "examples" / "lora.yaml").out
    copy = tmp_path / "resolved.yaml"
    copy.write_text(printed)
    assert yaml.safe_load(penstock("check", copy).out) == yaml.safe_load(printed)


def test_init_brings_samples_where_a_recipe_reads_a_local_file_and_leaves_own_data(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    told = penstock("init", "local", "--json").last
    assert told["data"] == "data/chat.jsonl"
    done = penstock("pack", "local.yaml", "--json").last
    assert done["stages"][0]["facts"]["rows"]["train"] > 200
    (tmp_path / "local.yaml").unlink()
    (tmp_path / "data" / "chat.jsonl").write_text("mine\n")
    assert "data" not in penstock("init", "local", "--json").last
    assert (tmp_path / "data" / "chat.jsonl").read_text() == "mine\n"
