"""What the documents of other tools print is taken as printed, and does what it says."""

import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import split_overrides
from penstock.config.loading.load import load, loads
from penstock.config.schema.run import RunConfig
from penstock.config.server.config import ServerConfig
from penstock.config.translate.apply import translate
from penstock.config.translate.erniekit.rules import ERNIEKIT
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.interpolation import resolve_references
from penstock.config.translate.nxdt.rules import NXDT
from penstock.config.translate.translation import put_at
from penstock.server import __main__ as server
from tests.config.dialects import document_examples as said
from tests.config.values import smallest
from tests.turns import taking_turns

GPUS = Devices(ranks=32)


def leaves(values: Any, above: str = "") -> list[tuple[str, Any]]:
    if isinstance(values, dict):
        return [leaf for name, value in values.items() for leaf in leaves(value, f"{above}{name}.")]
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return [leaf for at, value in enumerate(values) for leaf in leaves(value, f"{above}{at}.")]
    return [(above.removesuffix("."), values)]


def at(run: RunConfig, name: str) -> Any:
    found: Any = run
    for step in name.split("."):
        found = found[int(step)] if step.isdecimal() else getattr(found, step)
    return found


@pytest.mark.parametrize("example", said.LOCAL)
def test_a_block_of_local_training_means_what_it_says(example: str) -> None:
    block = yaml12.parse(said.LOCAL[example]).value
    run = loads(smallest(**block))
    for name, value in leaves(block):
        assert at(run, name) == (value if value != "" else None), name


def words_of(command: str, module: str) -> list[str]:
    """What follows the module of a command."""
    words = shlex.split(command)
    return words[words.index(module) + 1 :]


@pytest.mark.parametrize("command", said.TRAIN_COMMANDS)
def test_what_follows_the_module_of_training_is_taken_unchanged(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(said.LOCAL["a whole run"])
    [file], overrides = split_overrides(words_of(command, "xorl.cli.train"))
    run = load(tmp_path / file, overrides)
    for override in overrides:
        value = yaml12.parse(override.text).value
        assert at(run, override.name) == value, override.name
    assert run.model.model_path == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("command", said.SERVER_COMMANDS)
def test_what_follows_the_module_of_the_server_is_taken_unchanged(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("model_path: Qwen/Qwen3-8B\nenable_lora: true\n")
    words = words_of(command, "xorl.server.launcher")
    monkeypatch.chdir(tmp_path)
    served: list[ServerConfig] = []
    monkeypatch.setattr(server, "require_packages", lambda: None)
    monkeypatch.setattr(server, "prepare", lambda config, *_: config)
    monkeypatch.setattr(server, "serve", lambda config, _: served.append(config))
    assert server.main(words) == 0
    _, overrides = split_overrides(words)
    for override in overrides:
        name = override.name.removeprefix("server.")
        assert getattr(served[0], name) == yaml12.parse(override.text).value


@pytest.mark.parametrize("page", ["preference", "recurring"])
def test_the_first_block_of_a_page_is_a_whole_file(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guide" / f"{page}.md").read_text()
    run = loads(yaml12.parse(text.split("```yaml\n")[1].split("```")[0]).value)
    assert run.model.model_path
    assert run.train.output_dir


def of_erniekit(**keys: Any) -> RunConfig:
    found = translate({**said.ERNIEKIT_REQUIRED, **keys}, ERNIEKIT, GPUS)
    assert not found.of("refused", "unknown")
    return loads(found.settings)


ERNIEKIT_CONTEXTS: dict[str, dict[str, Any]] = {
    "sft": {"stage": "SFT"},
    "dpo": {"stage": "DPO"},
    "simpo": {"stage": "DPO", "loss_type": "simpo"},
    "lora": {"stage": "SFT", "lora": True},
    "bf16": {"stage": "SFT", "bf16": True},
    "fp16": {"stage": "SFT", "compute_type": "fp16"},
    "fp8": {"stage": "SFT", "compute_type": "fp8"},
    "cosine": {"stage": "SFT", "lr_scheduler_type": "cosine"},
    "polynomial": {"stage": "SFT", "lr_scheduler_type": "polynomial"},
    "evaluation": {"stage": "SFT", "do_eval": True, "eval_dataset_path": "e.jsonl"}
    | {"eval_steps": 10, "per_device_eval_batch_size": 1},
    "pipeline": {"stage": "SFT", "pipeline_parallel_degree": 2},
    "tensor": {"stage": "SFT", "tensor_parallel_degree": 2},
    "recompute": {"stage": "SFT", "recompute": True},
    "two sources": {"stage": "SFT", "train_dataset_path": "a.jsonl,b.jsonl"}
    | {"train_dataset_prob": "0.5,0.5"},
}

UNLIKE = {"save_strategy", "dataloader_num_workers"}
"""`no` is overruled by save_steps where it is left out, and loses what was saved where it is
written; processes that load data are started where that is written, and change nothing."""


@pytest.mark.parametrize("context", taking_turns(ERNIEKIT_CONTEXTS, 5))
def test_a_default_of_erniekit_may_be_written_wherever_it_may_be_left_out(context: str) -> None:
    keys = ERNIEKIT_CONTEXTS[context]
    expected = of_erniekit(**keys)
    defaults = {
        key: value
        for key, value in said.ERNIEKIT_DEFAULTS.items()
        if key not in keys and key not in UNLIKE
    }
    for key, value in defaults.items():
        assert of_erniekit(**keys, **{key: value}) == expected, key
    assert of_erniekit(**keys, **defaults) == expected
    of_erniekit(**keys, **{key: said.ERNIEKIT_DEFAULTS[key] for key in UNLIKE})


def test_recommended_words_of_erniekit_are_taken() -> None:
    run = of_erniekit(bf16=True, **said.ERNIEKIT_RECOMMENDED)
    assert run.train.precision == "bf16_mixed"


def nxdt_values(model: str, keys: dict[str, Any] | None = None) -> dict[str, Any]:
    """The printed parts of a file, with a vocabulary for what reads tokens, and other keys."""
    parts = (said.NXDT_TRAINER, said.NXDT_MANAGER, said.NXDT_STRATEGY, said.NXDT_DATA)
    text = "".join((*parts, model, said.NXDT_PRECISION))
    values = deepcopy(dict(yaml12.parse(text).value))
    put_at(values, "data.tokenizer.type", "builtin:bytes")
    if model == said.NXDT_MEGATRON_MODEL:
        values["model_source"] = "megatron"
        put_at(values, "data.data_prefix", [1.0, "book_text_document"])
    for key, value in (keys or {"data.train_dir": "tokens"}).items():
        put_at(values, key, value)
    return values


def of_nxdt(values: dict[str, Any]) -> RunConfig:
    found = translate(values, NXDT, GPUS)
    assert not found.of("refused", "unknown"), found.of("refused", "unknown")
    return loads(found.settings)


ALIGNED = said.NXDT_ALIGNED_DATA
NXDT_FILES: dict[str, dict[str, Any]] = {
    "hf": nxdt_values(said.NXDT_HF_MODEL),
    "megatron": nxdt_values(said.NXDT_MEGATRON_MODEL, {"data.seq_length": 4096}),
    "sft": nxdt_values(said.NXDT_HF_MODEL, {**ALIGNED, **said.NXDT_SFT}),
    "dpo": nxdt_values(said.NXDT_HF_MODEL, {**ALIGNED, **said.NXDT_DPO}),
}


@pytest.mark.parametrize("name", NXDT_FILES)
def test_printed_files_of_nxdt_do_what_they_say(name: str) -> None:
    run = of_nxdt(NXDT_FILES[name])
    train, data = run.train, run.data
    assert (train.max_steps, train.global_batch_size, train.micro_batch_size) == (20000, 1024, 1)
    assert (train.tensor_parallel_size, train.sequence_parallel, train.zero_stage) == (8, True, 1)
    assert (train.save_steps, train.save_total_limit) == (200, 1)
    assert (train.lr, train.max_grad_norm, train.precision) == (3e-4, 1.0, "bf16_mixed")
    assert train.load_checkpoint_path == "auto"
    assert train.tp_reduce_dtype == "bf16"
    assert train.ckpt_name == "megatron_llama--{step}-{consumed_samples}"
    is_megatron = name == "megatron"
    assert train.lr_decay_style == ("cosine" if is_megatron else "linear")
    assert train.weight_decay == (0.1 if is_megatron else 0.01)
    if is_megatron:
        assert data.datasets[0].ds_type == "megatron"
        assert data.sample_packing_method == "wrapped"
        assert data.sample_packing_sequence_len == 4096
        assert train.lr_min == 3e-5
    if name == "sft":
        assert data.datasets[0].type == "instruction"
        assert data.datasets[0].max_samples == 2250
    if name == "dpo":
        assert train.objective == "preference"
        assert (run.preference.beta, run.preference.loss_type) == (0.01, "sigmoid")
        assert data.max_prompt_len == 2048


@pytest.mark.parametrize("name", NXDT_FILES)
def test_a_default_of_nxdt_may_be_written_wherever_it_may_be_left_out(name: str) -> None:
    bare = dict(resolve_references(NXDT_FILES[name]))
    for key in said.NXDT_DEFAULTS:
        *above, last = key.split(".")
        inner: Any = bare
        for step in above:
            inner = inner.get(step, {})
        inner.pop(last, None)
    expected, every = of_nxdt(bare), deepcopy(bare)
    for key, value in said.NXDT_DEFAULTS.items():
        one = deepcopy(bare)
        put_at(one, key, value)
        put_at(every, key, value)
        assert of_nxdt(one) == expected, key
    assert of_nxdt(every) == expected
