"""Keys follow effects: a setting is in the key of training where, and only where, it changes what
is trained. Judged by the optimizer, its steps and the learning rates that come of each config."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from penstock.config.identity import eval_identity_fields, identity_fields, preference_identity
from penstock.config.loading.load import loads
from penstock.config.schema.effect import unused_fields, without_unused
from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError
from penstock.engine.optim.build import build_state_precision
from penstock.estimate.machine import unmatched_no_decay
from penstock.optim.build import build_optimizer
from penstock.optim.groups import Grouping, set_lr
from penstock.optim.schedule import lr_at
from penstock.pipeline.plan import pack_step, prepare_step
from penstock.pipeline.plan import plan as planned
from tests.config.values import smallest
from tests.engine.runs import short_job, train_here, write_model, write_rows
from tests.turns import one_day_in

STEPS_OF_EPOCH = 40

OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "anyprecision_adamw"},
    {"optimizer": "muon"},
    {"optimizer": "novograd"},
    {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}},
    {"optimizer": "torch.optim.RAdam"},
)
OPTIMIZER_FIELDS: tuple[dict[str, Any], ...] = (
    {"optimizer_dtype": "fp32"},
    {"optimizer_kwargs": {"betas": [0.9, 0.95], "eps": 1e-8}},
    {"optimizer_kwargs": {"betas": [0.95, 0.98], "eps": 1e-8}},
    {"optimizer_kwargs": {"eps": 1e-3}},
    {"optimizer_kwargs": {"momentum": 0.0, "nesterov": False}},
    {"optimizer_kwargs": {"momentum": 0.5}},
    {"optimizer_kwargs": {"grad_averaging": True}},
    {"lr": 2e-3},
    {"weight_decay": 0.3},
    {"no_decay_modules": ["norm"]},
    {"no_decay_params": ["bias"]},
    {"weight_decay": 0.3, "no_decay_params": ["bias"]},
    {"weight_decay": 0.3, "no_decay_params": ["bias"], "no_decay_modules": ["norm"]},
    {"muon_lr": 0.1},
    {"muon_momentum": 0.5},
    {"muon_nesterov": False},
    {"muon_ns_steps": 2},
    {"muon_adjust_lr_fn": "original"},
    {"muon_adjust_lr_fn": "match_rms_adamw"},
)

STYLES = (
    *("constant", "linear", "cosine", "polynomial", "wsd", "square", "sqrt"),
    *("inverse_sqrt", "noam", "noam_hold", "step", "exponential"),
)
WARMUPS: tuple[dict[str, Any], ...] = ({}, {"lr_warmup_steps": 3}, {"lr_warmup_ratio": 0.25})
LENGTHS: tuple[dict[str, Any], ...] = ({}, {"max_steps": 60})
SCHEDULE_FIELDS: tuple[dict[str, Any], ...] = (
    {"lr_start": 1e-5},
    {"lr_min": 9.99e-4},
    {"lr_decay_ratio": 0.5},
    {"lr_warmup_steps": 0},
    {"lr_warmup_steps": 5},
    {"num_train_epochs": 2},
    {"max_steps": 70},
    *(
        {"lr_schedule_kwargs": {name: value}}
        for name, value in {
            "warmup_style": "plus_one",
            "hold_steps": 2,
            "constant_steps": 2,
            "num_cycles": 1.0,
            "power": 2.0,
            "gamma": 0.5,
            "step_size": 3,
            "d_model": 16,
            "decay_rate": 1.0,
            "timescale": 4,
            "decay_steps": 5,
            "decay_shape": "cosine",
        }.items()
    ),
)


def run_of(**train: Any) -> RunConfig:
    return loads(smallest(train={"data_parallel_mode": "none", "lr": 1e-3, **train}))


def key(run: RunConfig) -> str:
    """What the key of training has of the run, besides its inputs."""
    lora = identity_fields(run, "lora") if run.lora.enable_lora else {}
    parts = (identity_fields(run, "model"), identity_fields(run, "train"), lora)
    return digest_json([*parts, eval_identity_fields(run), preference_identity(run)])


def total_steps(run: RunConfig) -> int:
    train = run.train
    return train.max_steps or int(train.num_train_epochs * STEPS_OF_EPOCH)


def learning_rates(run: RunConfig) -> list[float]:
    steps = total_steps(run)
    return [lr_at(step, steps, run.train) for step in range(steps)]


def trained(run: RunConfig) -> list[bytes]:
    """The weights and the optimizer states after a few steps of a small model."""
    torch.manual_seed(0)
    layer = {"proj": nn.Linear(6, 4), "norm": nn.LayerNorm(4)}
    model = nn.ModuleDict({"layer": nn.ModuleDict(layer)})
    train = run.train
    is_muon = train.optimizer == "muon"
    grouping = Grouping(
        weight_decay=train.weight_decay,
        no_decay_modules=train.no_decay_modules,
        no_decay_params=train.no_decay_params,
        matrices={"layer.proj.weight"} if is_muon else frozenset(),
        muon_lr_multiplier=train.muon_lr / train.lr if is_muon else 1.0,
    )
    named = list(model.named_parameters())
    optimizer = build_optimizer(named, train, grouping, precision=build_state_precision(train, []))
    for step, lr in enumerate(learning_rates(run)[:8]):
        set_lr(optimizer, lr)
        for _, parameter in named:
            parameter.grad = torch.sin(torch.arange(parameter.numel()) + step).view_as(parameter)
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*(parameter.detach() for _, parameter in named), *map(torch.as_tensor, states)]
    return [f"{tensor.dtype}{tensor.tolist()}".encode() for tensor in tensors]


def assert_keys_follow(
    behaviour: Any, bases: list[dict[str, Any]], changes: tuple[dict[str, Any], ...]
) -> tuple[int, int]:
    """Numbers of changes with and without effect, of those that are no errors."""
    counts = {True: 0, False: 0}
    for base in bases:
        before = run_of(**base)
        behaves, named = behaviour(before), key(before)
        for change in changes:
            nested = base.get("lr_schedule_kwargs", {}) | change.get("lr_schedule_kwargs", {})
            merged = {**base, **change} | ({"lr_schedule_kwargs": nested} if nested else {})
            try:
                after = run_of(**merged)
                changes_result = behaviour(after) != behaves
            except ConfigError:
                continue
            assert (key(after) != named) == changes_result, (base, change)
            counts[changes_result] += 1
    return counts[True], counts[False]


@pytest.mark.slow
def test_a_setting_of_an_optimizer_is_in_the_key_where_it_changes_its_steps() -> None:
    bases = [*OPTIMIZERS, *({**one, "weight_decay": 0.1} for one in OPTIMIZERS)]
    found = assert_keys_follow(trained, bases, OPTIMIZER_FIELDS)
    assert min(found) > 25


@one_day_in(3, of=1)
def test_a_setting_of_a_schedule_is_in_the_key_where_it_changes_a_learning_rate() -> None:
    bases = [
        {"lr_decay_style": style, **warmup, **length}
        for style, warmup, length in product(STYLES, WARMUPS, LENGTHS)
    ]
    found = assert_keys_follow(learning_rates, bases, SCHEDULE_FIELDS)
    assert min(found) > 90


ALIKE: dict[str, list[dict[str, Any]]] = {
    "float32": [
        {"train": {"enable_mixed_precision": False}},
        {"train": {"precision": "fp32"}},
        {"train": {"precision": "fp32", "enable_mixed_precision": False}},
        {"train": {"precision": "fp32", "ckpt_weights": "compute", "grad_accum_dtype": "fp32"}},
        {"train": {"precision": "fp32"}, "model": {"lm_head_fp32": True, "router_fp32": False}},
    ],
    "bfloat16 beside float32": [
        {},
        {"train": {"precision": "bf16_mixed"}},
        {"train": {"precision": "bf16", "master_weights": True}},
        {"train": {"master_weights": True, "enable_mixed_precision": True}},
        {"model": {"attention_cast_bf16": True}},
    ],
    "bfloat16": [
        {"train": {"precision": "bf16"}},
        {"train": {"master_weights": False}},
        {"train": {"precision": "bf16", "ckpt_weights": "compute"}},
    ],
    "reduced in bfloat16": [
        {"train": {"data_parallel_mode": "fsdp2", "fsdp_reduce_dtype": "bf16"}},
        {"train": {"fsdp_reduce_dtype": "bf16", "grad_accum_dtype": "bf16"}},
    ],
    "length": [{"train": {"max_steps": 9}}, {"train": {"max_steps": 9, "num_train_epochs": 4}}],
    "tokens": [{"train": {"max_tokens": 9}}, {"train": {"max_tokens": 9, "num_train_epochs": 4}}],
    "evaluation alone": [
        {"train": {"eval_only": True}, "data": {"val_set_size": 5}},
        {
            "train": {"eval_only": True, "lr": 1.0, "optimizer": "sgd", "num_train_epochs": 7},
            "data": {"val_set_size": 5},
        },
    ],
    "nf4": [
        {"lora": {"enable_lora": True, "enable_qlora": True, "quant_format": "nf4"}},
        {"lora": {"enable_qlora": True, "quant_format": "nf4", "quant_group_size": 64}},
    ],
    "adapters": [
        {"train": {"optimizer": "muon"}, "lora": {"enable_lora": True}},
        {"train": {"optimizer": "muon", "muon_lr": 0.5}, "lora": {"enable_lora": True}},
    ],
}
"""Configs that mean the same, by what they mean."""


def test_configs_that_mean_the_same_have_one_key_and_others_have_others() -> None:
    found = {name: {key(loads(smallest(**one))) for one in same} for name, same in ALIKE.items()}
    assert {name: len(keys) for name, keys in found.items()} == dict.fromkeys(ALIKE, 1)
    assert len(set().union(*found.values())) == len(ALIKE)


def train_key(**sections: dict[str, Any]) -> str:
    return stage_key(planned(loads(smallest(**sections)), ("train",)).step("train").stage)


def test_an_evaluation_is_known_by_the_rows_it_is_of() -> None:
    """Not by the rows of a training step, unless a number of batches has as many."""

    def key_of(**train: Any) -> str:
        # Rows of a length that is not chosen by the samples of a step.
        rows = {"sample_packing_sequence_len": 512}
        return train_key(
            train={"eval_only": True, "data_parallel_mode": "none", **train},
            data={"val_set_size": 5, **rows},
        )

    whole, part = key_of(), key_of(eval_max_batches=0.5)
    some, pairs = key_of(eval_max_batches=2), key_of(eval_max_batches=2, eval_rows_per_batch=2)
    assert len({whole, part, some, pairs}) == 4
    steps: tuple[dict[str, Any], ...] = (
        {"micro_batch_size": 2},
        {"gradient_accumulation_steps": 2},
        {"global_batch_size": 2},
    )
    for rows in steps:
        assert key_of(**rows) == whole
        assert key_of(eval_max_batches=0.5, **rows) == part
        assert key_of(eval_max_batches=2, **rows) not in (some, pairs)
        assert key_of(eval_max_batches=2, eval_rows_per_batch=2, **rows) == pairs


@pytest.mark.parametrize("method", ["sequential", "wrapped", "multipack", "greedy"])
def test_packing_in_order_has_one_key_for_all_sizes_of_groups(method: str) -> None:
    data = {"sample_packing_method": method}
    runs = [loads(smallest(data={**data, "sample_packing_group_size": size})) for size in (99, 9)]
    prepared = prepare_step(runs[0]).artifact
    keys = {pack_step(run, prepared).artifact.key for run in runs}
    assert len(keys) == (1 if method in ("sequential", "wrapped") else 2)


def test_a_run_without_its_unused_fields_leaves_nothing_unused_that_is_written() -> None:
    run = loads(smallest(train={"lr_start": 1e-6, "max_steps": 3, "num_train_epochs": 2}))
    written = {field.path for field in unused_fields(run, run) if not field.is_default}
    assert written == {("train", "lr_start"), ("train", "num_train_epochs")}
    used = without_unused(run)
    assert all(field.is_default for field in unused_fields(used, used))


@pytest.mark.dist
@one_day_in(2, of=0)
def test_what_keeps_parts_in_one_precision_changes_no_bit_where_all_is_in_it(tmp_path) -> None:
    """Fields of the model that are in no key in some precisions, judged by a step of training."""
    write_rows(tmp_path / "packed", 8)
    write_model(tmp_path / "model", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2)
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"precision": "fp32"}, {"lm_head_fp32": True}),
        ({"precision": "fp32"}, {"router_fp32": False}),
        ({"enable_mixed_precision": True}, {"attention_cast_bf16": True}),
        ({"precision": "bf16"}, {"attention_cast_bf16": True}),
    )
    for train, model in cases:
        digests = [
            train_here(short_job(tmp_path, f"{train}{model}{number}", model=one, **train))
            for number, one in enumerate(({}, model))
        ]
        assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_name_without_weight_decay_that_is_no_parameters_is_told(backend: str) -> None:
    exempt = {"no_decay_modules": ["norm", "nrom"], "no_decay_params": ["bias", "embed_tokens"]}
    model = {"config_path": "builtin:tiny-qwen3", "backend": backend}
    run = loads(smallest(model=model, train={"weight_decay": 0.1, **exempt}))
    assert unmatched_no_decay(run) == (
        "train.no_decay_modules: nrom is in no name of this model; did you mean norm?",
        "train.no_decay_params: bias is in no name of this model",
    )
    assert unmatched_no_decay(loads(smallest(train=exempt))) == ()
