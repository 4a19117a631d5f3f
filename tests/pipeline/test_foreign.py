"""Config files of other tools are run as they are: checked, planned, trained to the end, and found
again. Names of models, data and folders are changed, lengths are shorter, and nothing else is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import yaml12
from tests.cli.command import penstock
from tests.config.dialects.stand_ins import ANSWER, QUESTION, write_records

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "configs" / "foreign"
CORPUS = ROOT / "tests" / "config" / "dialects" / "corpus"

STEPS, LENGTH, ROWS = 2, 128, 20


@dataclass(frozen=True)
class Example:
    """A file of a tool, what a user changes in it, and what the trained adapter then says."""

    file: Path
    changes: Callable[[str, Path], Mapping[str, Any]]
    """Dotted keys to values, given the model's folder and one with data."""
    adapter: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of `adapter_config.json`, as PEFT names it; empty: all weights are trained."""
    rate: float = 0.0
    """The highest learning rate of the steps."""
    gaps: tuple[str, ...] = ()
    """Keys that the run differs by."""


def _records(folder: Path, kind: str) -> str:
    return str(write_records(folder / f"{kind}.jsonl", kind, {}))


def _questions(folder: Path, question: str, answer: str) -> str:
    rows = [{question: QUESTION, answer: f"{row}. {ANSWER}"} for row in range(ROWS)]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _llama_factory(model: str, data: Path) -> Mapping[str, Any]:
    info = {name: {"file_name": f"{name}.json"} for name in ("identity", "alpaca_en_demo")}
    (data / "dataset_info.json").write_text(json.dumps(info))
    rows = [
        {"instruction": QUESTION, "input": "", "output": f"{row}. {ANSWER}"} for row in range(ROWS)
    ]
    for name in info:
        (data / f"{name}.json").write_text(json.dumps(rows))
    return {
        "model_name_or_path": model,
        "dataset_dir": str(data),
        "cutoff_len": LENGTH,
        "max_steps": STEPS,
        "dataloader_num_workers": 0,
        "template": "chatml",
    }


def _erniekit(model: str, data: Path) -> Mapping[str, Any]:
    turns = _records(data, "sft_turns")
    return {
        "model_name_or_path": model,
        "train_dataset_path": f"{turns},{turns}",
        "eval_dataset_path": turns,
        "num_samples_each_epoch": 40,
        "max_seq_len": LENGTH,
        "max_steps": STEPS,
        "warmup_steps": 1,
    }


def _nxdt(model: str, data: Path) -> Mapping[str, Any]:
    rows = _questions(data, "input", "output")
    return {
        "trainer.devices": 1,
        "trainer.max_steps": STEPS,
        "exp_manager.resume_from_checkpoint": model,
        "data.global_batch_size": 4,
        "data.train_dir": rows,
        "data.val_dir": rows,
        "data.tokenizer.type": model,
        "model.model_config": model,
        "model.encoder_seq_length": LENGTH,
        "model.num_layers": 2,
        "model.optim.sched.warmup_steps": 1,
    }


EXAMPLES: Mapping[str, Example] = {
    "axolotl": Example(
        FOREIGN / "axolotl.yaml",
        lambda model, data: {
            "base_model": model,
            "datasets": [{"path": _records(data, "chat"), "type": "chat_template"}],
            "dataset_prepared_path": None,
            "val_set_size": 2,
            "sequence_len": LENGTH,
            "micro_batch_size": 1,
            "max_steps": STEPS,
        },
        {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": 7},
        2e-4,
    ),
    "llama-factory": Example(
        FOREIGN / "llama-factory.yaml",
        _llama_factory,
        {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": 7},
        1e-4,
    ),
    "llama-factory-v1": Example(
        CORPUS / "llama-factory-v1.yaml",
        lambda model, data: {
            "model": model,
            "train_dataset": _records(data, "chat"),
            "cutoff_len": LENGTH,
            "max_steps": STEPS,
        },
        {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": 7},
        1e-4,
    ),
    "trl": Example(
        FOREIGN / "trl.yaml",
        lambda model, data: {
            "model_name_or_path": model,
            "dataset_name": _records(data, "chat"),
            "eval_strategy": "no",
            "max_length": LENGTH,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
        },
        rate=2e-5,
    ),
    "trl-dpo": Example(
        FOREIGN / "trl-dpo.yaml",
        lambda model, data: {
            "model_name_or_path": model,
            "dataset_name": _records(data, "preference"),
            "max_length": LENGTH,
            "max_steps": STEPS,
            "warmup_steps": 1,
        },
        {"r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": 2},
        5e-6,
    ),
    "unsloth": Example(
        CORPUS / "trl-arguments.yaml",
        lambda model, data: {
            "model_name_or_path": model,
            "max_length": LENGTH,
            "max_steps": STEPS,
            "warmup_steps": 1,
            "data": _records(data, "chat"),
        },
        {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": 2},
        2e-4,
    ),
    "torchtune": Example(
        CORPUS / "torchtune-lora.yaml",
        lambda model, data: {
            "checkpointer.checkpoint_dir": model,
            "tokenizer.max_seq_len": LENGTH,
            "dataset.data_files": _questions(data, "ask", "reply"),
            "max_steps_per_epoch": STEPS,
            "gradient_accumulation_steps": 1,
            "lr_scheduler.num_warmup_steps": 1,
        },
        {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": 6},
        3e-4,
        gaps=("quantizer",),
    ),
    "erniekit": Example(
        FOREIGN / "erniekit.yaml",
        _erniekit,
        {"r": 16, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": 7},
        2e-4,
    ),
    "nxdt": Example(FOREIGN / "nxdt.yaml", _nxdt, rate=1.5e-5),
}


def written(example: Example, model: Path, folder: Path) -> tuple[Path, list[object]]:
    """The changed file, and the options beside it."""
    values: dict[str, Any] = yaml12.parse(example.file.read_text()).value
    changes = dict(example.changes(str(model), folder))
    data = changes.pop("data", None)
    for name, value in changes.items():
        *above, last = name.split(".")
        section = values
        for step in above:
            section = section.setdefault(step, {})
        section[last] = value
    file = folder / "theirs.yaml"
    file.write_text(yaml12.dump(values))
    options: list[object] = ["--data.dataset_prepared_path", folder / "prepared"]
    options += ["--pipeline.artifacts_path", folder / "artifacts", "--train.output_dir"]
    options += [folder / "out"]
    if data:
        options += ["--data.datasets", json.dumps([{"path": data, "type": "chat"}])]
    return file, options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["axolotl"])
def test_a_file_of_another_tool_is_trained_to_the_end_and_found_again(name, model, tmp_path):
    example = EXAMPLES[name]
    file, options = written(example, model, tmp_path)
    ran = penstock("run", file, *options, "--json")
    assert ran.code == 0, ran.err
    stages = {stage["stage"]: stage for stage in ran.last["stages"]}
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    metrics = tmp_path / "out" / "metrics.jsonl"
    rates = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert stages["train"]["facts"]["steps"] == STEPS
    assert max(record.get("lr", 0) for record in rates) == pytest.approx(example.rate)
    if example.adapter:
        adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
        assert len(adapter["target_modules"]) == example.adapter["target_modules"]
        assert {key: adapter[key] for key in ("r", "lora_alpha", "lora_dropout")}.items() <= (
            example.adapter.items()
        )
    again = penstock("run", file, *options, "--json")
    assert {stage["status"] for stage in again.last["stages"]} == {"cached"}
    answered = penstock("chat", file, *options, "--prompt", QUESTION, "--max-new-tokens", 4)
    assert answered.code == 0, answered.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_of_each_tool_is_checked_planned_and_the_same_run_once_translated(
    name, model, tmp_path
):
    example = EXAMPLES[name]
    file, options = written(example, model, tmp_path)
    assert name != "unsloth" or " data.datasets: required" in penstock("check", file).err
    checked = penstock("check", file, *options)
    assert checked.code == 0, checked.err
    left_out = [line for line in checked.err.splitlines() if line.startswith("warning: ")]
    assert len(left_out) == len(example.gaps), checked.err
    theirs = penstock("plan", file, *options, "--json")
    assert theirs.code == 0, theirs.err
    assert theirs.last["costs"]["length"]["steps"] == STEPS
    native = tmp_path / "ours.yaml"
    translated = penstock("translate", file, "-o", native)
    assert translated.code == (4 if example.gaps else 0), translated.err
    for key in example.gaps:
        assert f"# not translated: {key}: " in native.read_text()
    ours = penstock("plan", native, *options, "--json")
    assert ours.code == 0, ours.err
    keys = [[stage["key"] for stage in said.last["plan"]] for said in (theirs, ours)]
    assert keys[0] == keys[1]
