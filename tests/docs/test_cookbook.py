"""Configs of the cookbook and of the page on torchtune are whole files that do their task."""

import json
import re
from pathlib import Path

import pytest

from penstock.config.loading.load import load
from tests.cli.command import penstock
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("warm_ranks")

PAGES = sorted([*(ROOT / "docs" / "cookbook").glob("*.md"), ROOT / "docs/migrate/torchtune.md"])
CONFIG = re.compile(r"^```yaml\n# ([\w-]+\.yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIGS = {name: text for page in PAGES for name, text in CONFIG.findall(page.read_text())}
HUB_MODEL = re.compile(r"model_path: Qwen/\S+")
TINY = ("--train.enable_mixed_precision", "false", "--train.max_steps", "2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of the pages: their configs with a tiny model, and their data."""
    turns = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4, of course"},
    ]
    chats = [{"messages": [{**turns[0], "content": f"{i} + 2?"}, turns[1]]} for i in range(60)]
    pairs = [{"prompt": f"{i} + 2?", "chosen": "4", "rejected": "five"} for i in range(60)]
    (tmp_path / "chats").mkdir()
    for name, rows in {
        "chats.jsonl": chats,
        "chats/1.jsonl": chats,
        "more-chats.jsonl": chats[:40],
        "held-out.jsonl": chats[:10],
        "pairs.jsonl": pairs,
    }.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(HUB_MODEL.sub("config_path: builtin:tiny-qwen3", text))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_of_a_task_has_a_config(page):
    found = CONFIG.findall(page.read_text())
    assert found or page.name == "README.md"
    assert len(found) == page.read_text().count("```yaml")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_a_whole_file(name, tmp_path):
    (tmp_path / name).write_text(CONFIGS[name])
    run = load(tmp_path / name)
    assert run.model.model_path
    assert Path(str(run.train.output_dir)).name == name.removesuffix(".yaml")


AFTER_ANOTHER = {"dpo.yaml", "more.yaml", "from-prepared.yaml"}
"""Start from what another run has left."""


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - AFTER_ANOTHER))
def test_check_finds_the_data_of_a_config(name):
    here = ("--launch.nproc_per_node", "1") if name == "sharded.yaml" else ()
    checked = penstock("check", name, *here)
    assert checked.code == 0, checked.err
    assert "not looked at" not in checked.out + checked.err


def run(name, *overrides):
    done = penstock("run", name, *TINY, *overrides, "--json")
    assert done.code == 0, done.err
    return {stage["stage"]: stage for stage in done.last["stages"]}


@pytest.mark.exhaustive
def test_dpo_and_more_training_follow_an_sft_run(folder):
    config = (folder / "sft.yaml").read_text()
    base = folder / "base.yaml"
    base.write_text(config.partition("lora:")[0].replace("outputs/sft", "outputs/base"))
    run("base.yaml")
    for name in ("sft.yaml", "more.yaml"):
        text = (folder / name).read_text()
        model = "model_path: outputs/base/hf"
        (folder / name).write_text(text.replace("config_path: builtin:tiny-qwen3", model))
    run("sft.yaml")
    assert (folder / "outputs/sft/adapter/adapter_model.safetensors").is_file()
    run("more.yaml")
    assert (folder / "outputs/more/adapter/adapter_model.safetensors").is_file()
    stages = run("dpo.yaml")
    assert list(stages) == ["prepare", "pack", "reference", "train", "export"]
    again = run("dpo.yaml", "--preference.beta", "0.3", "--train.output_dir", "outputs/dpo-0.3")
    assert again["reference"]["status"] == "cached"
    reported = penstock("report", "outputs/dpo", "outputs/dpo-0.3")
    assert reported.code == 0, reported.err


@pytest.mark.exhaustive
def test_prepared_data_is_reused_without_its_sources(folder):
    assert penstock("pack", "shared.yaml").code == 0
    stages = run("shared.yaml")
    assert [stages[name]["status"] for name in ("prepare", "pack")] == ["cached", "cached"]
    (folder / "chats.jsonl").unlink()
    stages = run("from-prepared.yaml")
    assert stages["pack"]["status"] == "cached"
