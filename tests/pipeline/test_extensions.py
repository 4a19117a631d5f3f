"""The example package of docs/extend.md, built and installed: its parts in a run."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

from penstock.config.loading.load import load
from penstock.core.cache.stage import identity
from penstock.core.errors import CapabilityError
from penstock.pipeline.plan import plan
from penstock.rows.tokenizer import byte_tokenizer
from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.packages import installed, write_package
from tests.pipeline.runs import write_run

EXAMPLE = ROOT / "docs" / "extend"
DYING = """
import os, signal, sys
from penstock_faq import stages
count_lengths = stages.count_lengths

def die(folder, bins):
    if folder.name == "validation":
        os.kill(os.getpid(), signal.SIGKILL)
    return count_lengths(folder, bins)

stages.count_lengths = die
from penstock.cli.main import main
main(sys.argv[1:])
"""


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of a project and unpack it into `folder`, as an installer does."""
    wheels = folder.with_suffix(".wheels")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def raised(source: Path, target: Path, file: str, old: str, new: str) -> Path:
    """A copy of the project with a higher version somewhere."""
    shutil.copytree(source, target)
    text = (target / file).read_text()
    assert text.count(old) == 1
    (target / file).write_text(text.replace(old, new))
    return target


@contextmanager
def packages(folder: Path) -> Iterator[None]:
    """A folder of packages is on the path of this process and of those that it starts."""
    with installed(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def faq_run(folder: Path) -> Path:
    rows = folder / "faq.csv"
    with rows.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["Frage", "Antworten", "Thema"])
        writer.writerows(
            [f"What is {n} doubled?", f"{2 * n}|twice {n}", "numbers"] for n in range(40)
        )
    columns = {"question": "Frage", "answers": "Antworten", "topic": "Thema"}
    return write_run(
        folder,
        data={"datasets": [{"path": str(rows), "type": "faq_csv", "type_kwargs": columns}]},
        train={
            "loss": "focal",
            "loss_kwargs": {"gamma": 1.0},
            "eval_metrics": {"entropy": {}},
            "max_steps": 2,
        },
        pipeline={"extra_stages": {"data_card": {"bins": 4}}},
    )


def outcome(*words: object) -> dict:
    ended = penstock(*words, "--json")
    assert ended.code == 0, ended.err
    return ended.last


def plan_of(config: Path) -> dict[str, dict]:
    return {stage["stage"]: stage for stage in outcome("plan", config)["plan"]}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_parts_of_a_package_run_are_cached_resumed_and_built_again_by_their_versions(tmp_path):
    config = faq_run(tmp_path)
    example = build(EXAMPLE, tmp_path / "packages")
    with packages(example):
        killed = subprocess.run(
            [sys.executable, "-c", DYING, "stage", "data_card", str(config)],
            check=False,
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        (counted,) = (tmp_path / "artifacts" / "data_card").glob("*/train.json")
        written = counted.stat().st_mtime_ns
        assert plan_of(config)["data_card"]["standing"] == "partial"

        stages = outcome("run", config)["stages"]
        statuses = {stage["stage"]: stage["status"] for stage in stages}
        assert list(statuses) == ["prepare", "pack", "data_card", "train", "export"]
        assert statuses["data_card"] == "resumed"
        assert counted.stat().st_mtime_ns == written
        manifest = json.loads((counted.parent / "manifest.json").read_text())
        assert manifest["facts"]["samples"] == {"train": 36, "validation": 4}
        assert manifest["settings"] == {"package": "penstock-faq 1.0", "options": {"bins": 4}}
        assert "## validation: 4 samples" in (counted.parent / "card.md").read_text()
        assert '"gamma": 1.0' in (tmp_path / "out" / "manifest.json").read_text()
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        (evaluation,) = [record for record in records if "eval_loss" in record]
        assert 0 < evaluation["eval_entropy"] < 6
        stages = outcome("run", config)["stages"]
    assert {stage["status"] for stage in stages} == {"cached"}

    release = raised(
        EXAMPLE, tmp_path / "release", "pyproject.toml", 'version = "1.0"', 'version = "1.1"'
    )
    with packages(build(release, tmp_path / "released")):
        table = penstock("plan", config).out
    assert "datasets.0.part.package: penstock-faq 1.0 -> 1.1" in table
    assert "parts.loss.package: penstock-faq 1.0 -> 1.1" in table
    assert "    package: penstock-faq 1.0 -> 1.1" in table

    changed = raised(
        EXAMPLE,
        tmp_path / "stages",
        "penstock_faq/stages.py",
        "version: ClassVar[int] = 1",
        "version: ClassVar[int] = 2",
    )
    with packages(build(changed, tmp_path / "raised")):
        planned = plan_of(config)
    standings = {name: stage["standing"] for name, stage in planned.items()}
    assert standings == {**dict.fromkeys(standings, "cached"), "data_card": "missing"}
    assert planned["data_card"]["changed"] == [{"field": "version", "here": 2, "there": 1}]


def test_without_the_package_each_name_is_refused_where_it_is_written(tmp_path):
    refused = penstock("plan", faq_run(tmp_path))
    assert refused.code == 2
    assert re.findall(r"run\.yaml:\d+: ([\w.]+): ", refused.err) == [
        "data.datasets.0.type",
        "pipeline.extra_stages.data_card",
        "train.eval_metrics.entropy",
        "train.loss",
    ]


FAMILY = """
from dataclasses import replace
from penstock.models.families.llama import LLAMA
MINE = replace(LLAMA, model_type="my_llama")
"""


def test_a_family_of_a_package_is_native_and_its_release_is_in_the_key_of_training(tmp_path):
    entry = {"penstock.families": {"my_llama": "my_models:MINE"}}
    package = write_package(tmp_path / "packages", "my_models", "2.0", entry, FAMILY)
    folder = tmp_path / "model"
    LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "my_llama"}))
    model = {"config_path": str(folder), "tokenizer_path": str(folder), "backend": "native"}
    file = write_run(tmp_path / "run", model=model)
    with installed(package):
        train = plan(load(file)).step("train").stage
    assert identity(train)["settings"]["layer_versions"] == {
        "package": "my_models 2.0",
        "version": 1,
    }
    with pytest.raises(CapabilityError, match="my_llama"):
        plan(load(file))
