"""Finished runs small enough to be changed and asked for hundreds of times."""

import csv
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config.loading.load import load
from penstock.core.cache.manifest import read_manifest
from penstock.core.cache.store import PlannedStage, fetch_cached
from penstock.core.errors import PenstockError
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from penstock.rows.tokenizer import byte_tokenizer
from tests.changes.kinds import CHANGES, NEUTRAL, undone, without_override
from tests.media.pictures import picture
from tests.pipeline.runs import write_run
from tests.ranks import on_ranks
from tests.stages.tars import tar_of

TEXT = {"type": "text"}

SEED = int(os.environ.get("PENSTOCK_CHANGES_SEED", time.time_ns() % 1_000_000))


@dataclass(frozen=True)
class Said:
    """What became of a plan: the key of each stage and whether it is cached, or the error."""

    stages: dict[str, tuple[str, bool]]
    error: str = ""


@dataclass(frozen=True)
class Target:
    """A file, the run that reads it, and its first stage that does."""

    name: str
    path: Path
    config: Path
    stage: str

    def __str__(self) -> str:
        return f"{self.name} of {self.config.parent.name}"


def ask(config: Path) -> Said:
    """Plan the run, and look at its results as whoever runs it: until one is not there."""
    stages: dict[str, tuple[str, bool]] = {}
    try:
        planned = plan(load(config), ranks="this_process")
        steps = planned.used if planned.composed else planned.steps
        for step in steps:
            is_cached = fetch_cached(step) is not None
            stages[step.stage.name] = step.artifact.key, is_cached
    except PenstockError as error:
        return Said(stages, str(error))
    return Said(stages)


def bring(config: Path) -> list[str]:
    """Run every stage in this process, which is its only rank."""
    run = load(config)
    planned = plan(run, ranks="this_process")
    return [
        execute_stage(step, planned.run, RebuildOptions(), lambda _: None).status
        for step in planned.steps
    ]


def bring_changed(config: Path, stage: str, file: Path) -> str:
    """Run the stages up to one of which a file is changed after it was planned, to other content
    that can be read as well; the error."""
    planned = plan(load(config), ranks="this_process")
    content = file.read_bytes()
    is_text = file.suffix == ".json"
    try:
        for step in planned.steps:
            if step.stage.name == stage:
                other = content + b" " if is_text else content[:-1] + bytes([content[-1] ^ 1])
                file.write_bytes(other)
            execute_stage(step, planned.run, RebuildOptions(), lambda _: None)
    except PenstockError as error:
        return str(error)
    return ""


def write_model(folder: Path) -> Path:
    """A Llama in several files, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="16KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_adapter(folder: Path, model: Path) -> Path:
    base = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    adapted: Any = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    )
    adapted.save_pretrained(folder)
    return folder


def write_data(folder: Path) -> list[dict[str, Any]]:
    """The same kind of records in every format; the data sets of a config."""
    folder.mkdir(parents=True)

    def rows(name: str) -> list[dict[str, str]]:
        return [{"text": f"{name} {number}, and on it goes"} for number in range(6)]

    def lines(name: str) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows(name))

    (folder / "a.jsonl").write_text(lines("lines"))
    with (folder / "b.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["text"])
        writer.writeheader()
        writer.writerows(rows("table"))
    pq.write_table(pa.Table.from_pylist(rows("columns")), folder / "c.parquet")
    table = pa.Table.from_pylist(rows("arrow"))
    with pa.OSFile(str(folder / "d.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as w:
        w.write_table(table)
    (folder / "e.tar").write_bytes(tar_of(rows("archive")))
    (folder / "f.txt").write_text("".join(row["text"] + "\n" for row in rows("plain")))
    (folder / "g.json").write_text(json.dumps(rows("document")))
    (folder / "h").mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        (folder / "h" / name).write_text(lines(f"folder {name}"))
    datasets.Dataset.from_list(rows("saved")).save_to_disk(str(folder / "i"))
    names = ("a.jsonl", "b.csv", "c.parquet", "d.arrow", "e.tar", "f.txt", "g.json", "h", "i")
    return [{"path": str(folder / name), **TEXT} for name in names]


def text_run(folder: Path) -> tuple[Path, list[Target]]:
    """Data of every format, a model of several files, all stages to a push."""
    model = write_model(folder / "model")
    data = write_data(folder / "data")
    config = write_run(
        folder,
        model={"model_path": str(model), "config_path": None, "foundation": {}},
        data={"datasets": data},
        train={"num_train_epochs": 1, "max_steps": 2},
        push={"url": f"file://{folder}/pushed"},
    )
    inputs = [file for file in sorted((folder / "data").rglob("*")) if file.is_file()]
    unread = {"dataset_info.json", "state.json"}  # but for names of files
    found = [Target(_name(f, folder), f, config, "prepare") for f in inputs if f.name not in unread]
    for file in sorted(model.iterdir()):
        is_tokenizer = "token" in file.name or "template" in file.name
        stage = "prepare" if is_tokenizer or file.name == "generation_config.json" else "train"
        found.append(Target(_name(file, folder), file, config, stage))
    return config, found


def pairs_run(folder: Path) -> tuple[Path, list[Target]]:
    """Preferences with a template file, an adapter that is trained on, and a reference."""
    folder.mkdir(parents=True)
    model = write_model(folder / "model")
    adapter = write_adapter(folder / "adapter", model)
    template = folder / "templates" / "template.jinja"
    template.parent.mkdir()
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}"
        "{% endgeneration %}{{ eos_token }}{% endfor %}"
    )
    pairs = folder / "data" / "pairs.jsonl"
    pairs.parent.mkdir()
    with pairs.open("w") as stream:
        for i in range(8):
            pair = {"prompt": f"{i} + {i} =", "chosen": f"{2 * i}", "rejected": f"Not {i}"}
            stream.write(json.dumps(pair) + "\n")
    config = write_run(
        folder,
        model={"model_path": str(model), "config_path": None, "foundation": {}},
        data={
            "datasets": [{"path": str(pairs), "type": "preference"}],
            "chat_template": str(template),
        },
        lora={"enable_lora": True, "init_adapter_path": str(adapter)},
        train={"objective": "preference", "num_train_epochs": 1, "max_steps": 2},
    )
    found = [Target(_name(file, folder), file, config, "prepare") for file in (template, pairs)]
    found += [
        Target(_name(adapter / name, folder), adapter / name, config, "reference")
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    weights = sorted(model.glob("*.safetensors"))[0]
    return config, [*found, Target(_name(weights, folder), weights, config, "reference")]


def pictures_run(folder: Path) -> tuple[Path, list[Target]]:
    """Images beside the data that names them, a composed model, encoded images."""
    images = folder / "images"
    images.mkdir(parents=True)
    with (images / "data.jsonl").open("w") as stream:
        for number in range(4):
            (images / f"{number}.png").write_bytes(picture(number, 24 + number, 30, "PNG"))
            parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "What?"}]
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat"}]
            stream.write(json.dumps({"messages": turns}) + "\n")
    config = write_run(
        folder,
        model={
            "config_path": "builtin:tiny-llama",
            "foundation": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48},
            "encoders": {"image": {"config_path": "builtin:tiny-clip"}},
            "freeze": ["vision", "language"],
        },
        data={
            "datasets": [{"path": str(images / "data.jsonl"), "type": "chat"}],
            "sample_packing_sequence_len": 512,
            "val_set_size": 0,
            "encode_images": True,
        },
        train={"num_train_epochs": 1, "max_steps": 1},
    )
    files = sorted(images.iterdir())
    return config, [Target(_name(file, folder), file, config, "prepare") for file in files]


def start_run(folder: Path, trained: Path) -> tuple[Path, list[Target]]:
    """A run from the weights of a checkpoint of the run in `trained`, which nobody has started."""
    [checkpoint] = (trained / "out" / "checkpoints").glob("global_step_*")
    shutil.copytree(checkpoint, folder / "start")
    config = write_run(
        folder,
        model={"model_path": str(trained / "model"), "config_path": None, "foundation": {}},
        data={"datasets": [{"path": str(trained / "data/a.jsonl"), **TEXT}]},
        train={"init_checkpoint_path": str(folder / "start"), "max_steps": 1},
    )
    files = [file for file in sorted((folder / "start").rglob("*")) if file.is_file()]
    full = [file for file in files if file.stat().st_size]
    return config, [Target(_name(file, folder), file, config, "train") for file in full]


def results(config: Path) -> Iterator[Target]:
    """Every file that a result of the run lists, and its manifest."""
    planned = plan(load(config), ranks="this_process")
    for step in planned.used:
        manifest = read_manifest(step.path)
        assert manifest
        for file in ("manifest.json", *(str(each["path"]) for each in manifest["files"])):
            name = f"{step.stage.name}/{file}"
            yield Target(name, step.path / file, config, step.stage.name)


def step_of(config: Path, stage: str) -> PlannedStage:
    return plan(load(config), ranks="this_process").step(stage)


def build(config: Path) -> None:
    """Run all stages, on one warm rank. Files that results share become files of their own."""
    [statuses] = on_ranks(1, bring, config)
    assert set(statuses) == {"ran"}, statuses
    for file in config.parent.rglob("*"):
        if file.is_file() and file.stat().st_nlink > 1:
            other = shutil.copy2(file, file.with_name(f"{file.name}.own"))
            Path(other).replace(file)


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


class World:
    """Runs that are finished, and what each says when nothing has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.targets: list[Target] = []
        self.whole: dict[Path, Said] = {}

    def add(self, config: Path, targets: list[Target], *, is_built: bool = True) -> None:
        if is_built:
            build(config)
            targets = [*targets, *results(config)]
        self.targets += targets
        self.whole[config] = said = ask(config)
        assert not said.error
        assert all(cached for _, cached in said.stages.values()) is is_built, said

    def check(self, target: Target, kind: str) -> str:
        """Make the change; what noticed it."""
        change = {**CHANGES, **NEUTRAL}[kind]
        with undone(target.path), without_override():
            change(target.path, random.Random(f"{SEED} {kind} {target.name}"))
            return self.judge(target, kind, is_neutral=kind in NEUTRAL)

    def judge(self, target: Target, kind: str, *, is_neutral: bool) -> str:
        """What noticed the change to that file."""
        whole, case = self.whole[target.config], f"{kind} of {target}, seed {SEED}"
        said = ask(target.config)
        if is_neutral:
            assert said == whole, case
            return "not noticed"
        if target.stage == "compose" and kind == "remove" and said == whole:
            return "built again"  # when the run is planned
        if said.error:
            named = (target.path.name, str(target.path.parent), "model.model_path")
            assert any(name in said.error for name in named), f"{case}: {said.error}"
            return "error"
        assert said.stages.get(target.stage) != whole.stages[target.stage], case
        earlier = [*whole.stages][: [*whole.stages].index(target.stage)]
        assert all(said.stages[name] == whole.stages[name] for name in earlier), case
        return "runs again"
