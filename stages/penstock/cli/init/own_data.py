"""`penstock init DATA`: writes a config whose values are chosen for the data, model and machine."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.cli.init.inspect_data import (
    OBJECTIVES,
    OwnData,
    inspect_data,
    is_local_model,
    model_settings,
)
from penstock.cli.init.recipes import SCHEMA_FILE, write_config
from penstock.config.loading.load import loads
from penstock.config.schema.data import LONGEST_ROW
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.chosen_settings import ROOM, choose_settings
from penstock.estimate.costs.device_speed import detect_machine, slow_bfloat16
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.costs.memory import peak_memory
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.estimate.machine import (
    expected_rows_per_step,
    resolve_hf_config,
    rows_per_step_to_pack,
    world_size,
)
from penstock.rows.row_length import SHORTEST, fitted_row_length
from penstock.train.launch.torchrun import num_local_ranks

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

FEW_SAMPLES, MANY_SAMPLES = 1_000, 10_000
"""Below the first, three epochs; below the second, two epochs and adapters."""

MIN_HELD_OUT = 40
"""Samples from which some are held out."""

FULL_LR = ((0.5e9, 5e-5), (2e9, 2e-5), (math.inf, 1e-5))
"""Peak learning rates of full fine-tuning, up to a number of parameters."""

# The best rate of LoRA is about ten times that of all weights (LoRA Without Regret, Schulman 2025);
# DPO used 1e-6 for all weights (Rafailov et al., arXiv 2305.18290, appendix B).
LORA_LR, PREFERENCE_LORA_LR, PREFERENCE_FULL_LR = 2e-4, 2e-5, 1e-6


NOT_PLAIN = ("true", "false", "null", ".nan", ".inf")
"""Words that are no text in YAML unless they are quoted."""


@dataclass
class ChosenConfig:
    """Sections of a config, each value with the reason for it."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, name: str, value: Any, reason: str = "") -> None:
        """Set `section.field`."""
        section, _, key = name.partition(".")
        self.values.setdefault(section, {})[key] = value
        self.reasons[name] = reason

    def load(self) -> RunConfig:
        """As a run. Raises ConfigError as for a file."""
        return loads(self.values)

    def as_yaml(self, first: str) -> str:
        """As YAML with a comment behind each value."""
        lines = [f"# {first}"]
        for section, values in self.values.items():
            lines.append(f"{section}:")
            for key, value in values.items():
                name = f"{section}.{key}"
                reason = self.reasons[name] and f"# {self.reasons[name]}"
                if name == "data.datasets":
                    lines.append("  datasets:")
                    items = [f"{k}: {_scalar(v)}" for k, v in value[0].items()]
                    lines.append(f"{f'    - {items[0]}':<44} {reason}".rstrip())
                    lines += [f"      {item}" for item in items[1:]]
                else:
                    lines.append(f"{f'  {key}: {_scalar(value)}':<44} {reason}".rstrip())
        return "\n".join(lines) + "\n"


def write_config_for_data(
    data: str, output: Path | None, model: str | None, console: Console, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write a config (default: `run.yaml` here) that trains on this file or folder, and the schema
    beside it.

    Raises ConfigError if the file exists, if `data` is a config, or if no type fits its records.
    """
    if Path(data).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{data} is a config already; run penstock check {data}.")
    model = model or DEFAULT_MODEL
    own_data = inspect_data(data, model)
    console.say(describe(own_data))
    faults = "; ".join(own_data.faults[:3])
    if own_data.template:
        console.say(
            f"warning: {faults}: data.chat_template is {own_data.template}, "
            "which the model learns in training"
        )
    elif own_data.faults:
        console.say(f"warning: {own_data.dropped_records} give no sample with {model}: {faults}")
    body = choose(own_data, model).as_yaml(
        f"{describe(own_data)} `penstock check` tests this file, `penstock run` trains."
    )
    target = output or Path("run.yaml")
    return write_config(target, body, SCHEMA_FILE, console, overwrite=overwrite)


def describe(data: OwnData) -> str:
    """The data in one sentence."""
    about = "" if data.is_tokenized else "about "
    mean = f"{about}{data.tokens:,.0f} tokens in the mean"
    part = "longest answer with its prompt" if data.is_preference else "longest"
    longest = f"the {part} of {data.measured:,} has {about}{data.longest:,}"
    sides = "with both answers, " if data.is_preference else ""
    summary = f"{data.samples:,} samples of type {data.format.type}"
    return f"{data.path}: {summary}, {sides}{mean}; {longest}."


def choose(data: OwnData, model: str) -> ChosenConfig:
    """The config for the data, the model and this machine."""
    chosen = ChosenConfig()
    [(key, name)] = model_settings(model).items()
    chosen.put(f"model.{key}", name, "a hub id, or a folder")
    _choose_data(chosen, data)
    chosen.put("train.output_dir", f"outputs/{Path(data.path).stem or 'run'}")
    for section, values in OBJECTIVES.get(data.format.type, {}).items():
        for setting, value in values.items():
            chosen.put(f"{section}.{setting}", value, f"for type {data.format.type}")
    epochs = 1 + (data.samples < MANY_SAMPLES) + (data.samples < FEW_SAMPLES)
    if data.is_preference:
        epochs = min(epochs, 2)
    chosen.put("train.num_train_epochs", epochs, f"{data.samples:,} samples")
    _choose_method(chosen, data)
    _choose_rows(chosen, data)
    _choose_layout(chosen, data)
    return chosen


def _choose_data(chosen: ChosenConfig, data: OwnData) -> None:
    reason = f"from its records, which have {data.format.columns}"
    doubt = "" if data.is_certain else "; a guess: see penstock data show"
    chosen.put("data.datasets", [{"path": data.path, **data.format.settings()}], reason + doubt)
    if data.template:
        chosen.put("data.chat_template", data.template, f"included; otherwise {data.faults[0]}")
    if data.samples >= MIN_HELD_OUT:
        share = 0.1 if data.samples < FEW_SAMPLES else 0.05
        if share * data.samples > 500:
            share = 500
        chosen.put("data.val_set_size", share, "held out and evaluated")
    chosen.put("data.dataset_prepared_path", "outputs/data")


def _choose_method(chosen: ChosenConfig, data: OwnData) -> None:
    """LoRA unless all weights fit and there is data for them; the learning rate follows."""
    size, fits = _full_training(chosen, data)
    is_random = "config_path" in chosen.values["model"]
    if is_random:
        why = "random weights are trained whole"
    elif size is None:
        why = "adapters, as the model is not on this machine yet; false trains all weights"
    elif not fits:
        why = "training all weights does not fit into the memory here"
    elif data.samples < MANY_SAMPLES:
        why = "adapters: few samples; false trains all weights"
    else:
        why = "all weights fit into the memory here, and there is data for them"
    lora = not is_random and (size is None or not fits or data.samples < MANY_SAMPLES)
    chosen.put("lora.enable_lora", lora, why)
    if is_random:
        lr, kind = 1e-3, "for random weights"
    elif lora:
        lr = PREFERENCE_LORA_LR if data.is_preference else LORA_LR
        kind = "for LoRA; a tenth of it without"
    else:
        lr = next(lr for most, lr in FULL_LR if (size or 0) <= most)
        lr = PREFERENCE_FULL_LR if data.is_preference else lr
        kind = f"for all weights of {(size or 0) / 1e9:.2g} billion"
    chosen.put("train.lr", lr, f"peak, {kind}")
    chosen.put("train.lr_warmup_ratio", 0.05)
    chosen.put("train.lr_decay_style", "cosine")
    if data.samples >= MIN_HELD_OUT:
        chosen.put("train.eval_epochs", 1, "eval_loss says when more epochs do not help")
    if slow := slow_bfloat16():
        chosen.put("train.enable_mixed_precision", False, slow.partition(";")[0])


def _full_training(chosen: ChosenConfig, data: OwnData) -> tuple[int | None, bool]:
    """The number of parameters, None if the model is not here, and whether training all of them
    fits, with room for other programs."""
    model = next(iter(chosen.values["model"].values()))
    if not is_local_model(model):
        return None, False
    run = _with_estimated_rows(chosen.load(), data)
    machine = detect_machine(num_local_ranks(run))
    dims = compute_dims(run.train, world_size(run))
    try:
        cost = build_cost_model(run, resolve_hf_config(run))
    except PenstockError:  # `check` names the reason
        return None, False
    size = sum(map(math.prod, cost.shapes.values()))
    if machine.memory is None or not isinstance(dims, ParallelDims):
        return size, False
    needed = peak_memory(ShardedModel(run, cost, dims, machine.kind)).total
    return size, needed <= ROOM[machine.kind] * machine.memory


def _with_estimated_rows(run: RunConfig, data: OwnData) -> RunConfig:
    per_step = rows_per_step_to_pack(run)
    length = fitted_row_length(data.sizes, LONGEST_ROW, SHORTEST, per_step)
    return run.with_row_length(length)


def _choose_rows(chosen: ChosenConfig, data: OwnData) -> None:
    """Length of rows, if the longest sample is known; otherwise it is left to the pack stage."""
    run = _with_estimated_rows(chosen.load(), data)
    length, rows = run.data.row_length, expected_rows_per_step(run)
    samples = max(1, round(min(length / max(1.0, data.tokens), data.samples) * rows))
    steps = math.ceil(run.train.num_train_epochs * data.samples / samples)
    if data.is_measured:
        chosen.put(
            "data.sample_packing_sequence_len",
            length,
            f"tokens; holds {data.longest:,}, the longest",
        )
        chosen.put("data.dataloader_drop_last", False, "the last samples of an epoch count too")
    chosen.put(
        "train.micro_batch_size",
        1,
        f"samples of a step: about {samples}, in {rows * length:,} tokens; about {steps} steps",
    )


def _choose_layout(chosen: ChosenConfig, data: OwnData) -> None:
    """Sharding and recomputation, where one process on CPUs has memory to spare; otherwise they are
    left to the run, which chooses what fits the machine that it starts on."""
    if not is_local_model(next(iter(chosen.values["model"].values()))):
        return
    train = choose_settings(_with_estimated_rows(chosen.load(), data)).run.train
    if train.data_parallel_mode == "none" and not train.enable_gradient_checkpointing:
        chosen.put("train.data_parallel_mode", "none", "one process")
        chosen.put("train.enable_gradient_checkpointing", False, "there is memory to spare")


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z./][\w./-]*", value) and value.lower() not in NOT_PLAIN
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value < 1e-2:
        # json writes 1e-05, which YAML 1.1 reads as text: its numbers with an exponent have a dot.
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return json.dumps(value)
