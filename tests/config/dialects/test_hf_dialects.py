"""Files of TRL, LLaMA-Factory and axolotl, judged by the classes and schedules they stand for."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from penstock.config.loading import yaml12
from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.config.translate import shared as trackers
from penstock.config.translate.apply import DIALECTS, detect_dialect, find_dialect, translate
from penstock.config.translate.axolotl.rules import AXOLOTL
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.hf.llama_factory import LLAMA_FACTORY
from penstock.config.translate.hf.trl import TRL, TRL_DPO
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import GAPS, Line, Translation
from penstock.optim.groups import Grouping, parameter_groups
from penstock.optim.schedule import lr_at

FOREIGN = sorted((Path(__file__).parents[3] / "configs" / "foreign").glob("*.yaml"))
GPUS = Devices(ranks=2)

BASES: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"},
    "trl-dpo": {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"},
    "llama-factory": {
        **{"model_name_or_path": "m", "dataset": "d", "output_dir": "o"},
        **{"template": "qwen3", "finetuning_type": "full"},
    },
    "axolotl": {
        **{"base_model": "m", "datasets": [{"path": "d", "type": "alpaca"}]},
        **{"output_dir": "o", "learning_rate": 1e-4},
    },
}


def translated(dialect: Dialect, **keys: Any) -> Translation:
    return translate({**BASES[dialect.name], **keys}, dialect, GPUS)


def run_of(dialect: Dialect, **keys: Any) -> RunConfig:
    return loads(translated(dialect, **keys).settings)


def line_of(translation: Translation, key: str) -> Line:
    return next(line for line in translation.lines if line.key == key)


@pytest.mark.parametrize("file", FOREIGN, ids=lambda file: file.stem)
def test_the_order_of_keys_decides_nothing(file: Path) -> None:
    values = yaml12.parse(file.read_text()).value
    dialect = detect_dialect(values)
    assert dialect
    backwards = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value
        for name, value in reversed(values.items())
    }
    assert translate(values, dialect, GPUS).settings == (
        translate(backwards, dialect, GPUS).settings
    )


@pytest.mark.parametrize("name", ["trl", "trl-dpo", "llama-factory", "axolotl"])
def test_a_key_has_one_table_and_a_default_has_a_key(name: str) -> None:
    dialect = find_dialect(name)
    assert dialect in DIALECTS
    tables = [dialect.same, dialect.computed, dialect.unsupported, dialect.idle]
    assert sum(map(len, tables)) == len(dialect.keys)
    assert dialect.defaults.keys() | dialect.overridden_by.keys() <= dialect.keys
    smallest = loads(translate(BASES[name], dialect, GPUS).settings)
    assert smallest.train.optimizer_kwargs["betas"] == [0.9, 0.999]


@pytest.mark.parametrize("dialect", [TRL, TRL_DPO, LLAMA_FACTORY], ids=lambda one: one.name)
def test_every_argument_of_the_trainer_is_known(dialect: Dialect) -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= dialect.keys


def test_trls_keys_and_defaults_are_those_of_its_classes() -> None:
    shared = [trl.ModelConfig, trl.ScriptArguments]
    for dialect, own in ((TRL, trl.SFTConfig), (TRL_DPO, trl.DPOConfig)):
        fields = {f.name: f for one in (*shared, own) for f in dataclasses.fields(one)}
        assert fields.keys() <= dialect.keys
        for name, value in dialect.defaults.items():
            field = fields[name]
            made = field.default_factory
            theirs = field.default if made is dataclasses.MISSING else made()
            # None stands for what TRL and peft find out: bfloat16, and layers of the model's kind.
            assert theirs in (value, None), name


RATE = 0.02
KWARGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": st.floats(0.1, 2)},
    "cosine_with_min_lr": {"num_cycles": st.floats(0.1, 0.5), "min_lr_rate": st.floats(0, 1)},
    "polynomial": {"power": st.floats(0.5, 4), "lr_end": st.floats(0, RATE / 2)},
    "inverse_sqrt": {"timescale": st.integers(1, 99)},
    "warmup_stable_decay": {
        "num_decay_steps": st.integers(1, 30),
        "decay_type": st.sampled_from(["linear", "cosine", "1-sqrt"]),
        "warmup_type": st.just("linear"),
        "min_lr_ratio": st.floats(0, 1),
        "num_cycles": st.floats(0.1, 1),
    },
}
"""Arguments of transformers' schedules."""

NEEDED = {"cosine_with_min_lr": "min_lr_rate", "warmup_stable_decay": "num_decay_steps"}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, dict[str, Any], float, int]:
    """A name, arguments, warmup in steps or as a share of all, and the steps of a run."""
    name = draw(st.sampled_from(sorted(KWARGS)))
    needed = {key: KWARGS[name][key] for key in [NEEDED.get(name)] if key}
    others = {key: value for key, value in KWARGS[name].items() if key not in needed}
    kwargs = draw(st.fixed_dictionaries(needed, optional=others))
    warmup = draw(st.integers(0, 20) | st.floats(0.01, 0.3))
    return name, kwargs, warmup, draw(st.integers(60, 90))


@pytest.mark.parametrize("dialect", [TRL, LLAMA_FACTORY, AXOLOTL], ids=lambda one: one.name)
@given(schedules())
@settings(max_examples=25, deadline=None)
def test_rates_are_those_of_the_trainers_schedules(
    dialect: Dialect, case: tuple[str, dict[str, Any], float, int]
) -> None:
    name, kwargs, warmup, total = case
    key = "lr_scheduler" if dialect is AXOLOTL else "lr_scheduler_type"
    ratio = isinstance(warmup, float)
    asked = {"warmup_ratio" if ratio else "warmup_steps": warmup}
    if dialect is AXOLOTL and not ratio:
        asked["warmup_ratio"] = 0.0
    steps = {"max_steps": total, "learning_rate": RATE, **asked}
    run = run_of(dialect, **{key: name, "lr_scheduler_kwargs": kwargs}, **steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    of_warmup = math.ceil(warmup * total) if ratio else int(warmup)
    scheduler = get_scheduler(name, optimizer, of_warmup, total, dict(kwargs))
    [share] = cast("LambdaLR", scheduler).lr_lambdas
    for step in range(total):
        assert lr_at(step, total, run.train) == pytest.approx(RATE * share(step), rel=1e-9), step


def test_a_stable_rate_without_a_length_of_its_decay_is_refused_or_as_long_as_there() -> None:
    for dialect, key in ((TRL, "lr_scheduler_type"), (AXOLOTL, "lr_scheduler")):
        found = translated(dialect, **{key: "warmup_stable_decay"})
        assert "num_decay_steps" in line_of(found, key).why
        assert line_of(found, key).kind in GAPS
    wsd = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 10}
    train = run_of(LLAMA_FACTORY, **wsd, max_steps=111).train
    assert train.lr_schedule_kwargs.decay_steps == 101 - 101 // 3
    assert line_of(translated(LLAMA_FACTORY, **wsd), "lr_scheduler_type").kind in GAPS


def test_other_warmups_and_decays_are_refused() -> None:
    for kwargs in ({"warmup_type": "cosine"}, {"decay_type": "exp"}, {"num_stable_steps": 4}):
        asked = {"lr_scheduler_kwargs": {"num_decay_steps": 5, **kwargs}}
        found = translated(TRL, lr_scheduler_type="warmup_stable_decay", **asked)
        assert line_of(found, "lr_scheduler_kwargs").kind in GAPS


def test_a_share_of_warmup_becomes_the_steps_it_is_there() -> None:
    known = run_of(TRL, warmup_ratio=0.03, max_steps=110).train
    assert known.lr_warmup_steps == 4
    assert run_of(TRL, warmup_ratio=0.03).train.lr_warmup_ratio == 0.03
    assert run_of(TRL, warmup_steps=0.5, max_steps=10).train.lr_warmup_steps == 5
    assert run_of(AXOLOTL).train.lr_warmup_ratio == 0.03


@pytest.mark.parametrize(
    ("dialect", "keys", "precision"),
    [
        (TRL, {}, "bf16_mixed"),
        (TRL, {"bf16": False}, "fp32"),
        (TRL, {"bf16": False, "fp16": True}, "fp16_mixed"),
        (TRL, {"dtype": "bfloat16"}, "bf16"),
        (TRL, {"dtype": "bfloat16", "use_peft": True}, "bf16_mixed"),
        (TRL, {"torch_dtype": "bfloat16"}, "bf16"),
        (TRL, {"torch_dtype": "bfloat16", "use_peft": True}, "bf16_mixed"),
        (LLAMA_FACTORY, {"bf16": True}, "bf16_mixed"),
        (LLAMA_FACTORY, {"pure_bf16": True, "bf16": True}, "bf16"),
        (AXOLOTL, {"bf16": "auto"}, "bf16"),
        (AXOLOTL, {"bf16": True, "adapter": "lora"}, "bf16_mixed"),
        (AXOLOTL, {}, "fp32"),
    ],
)
def test_weights_and_products_have_the_bits_they_have_there(
    dialect: Dialect, keys: dict[str, Any], precision: str
) -> None:
    assert run_of(dialect, **keys).train.precision == precision


def test_samples_of_llama_factory_that_are_cut_elsewhere_are_told_apart_from_documents() -> None:
    kinds = [
        line_of(translated(LLAMA_FACTORY, cutoff_len=64, stage=stage), "cutoff_len").kind
        for stage in ("sft", "dpo", "pt")
    ]
    assert kinds == ["approximated", "approximated", "translated"]


def test_a_sample_has_a_row_to_itself_unless_samples_are_packed() -> None:
    alone = run_of(TRL, max_length=512).data
    assert (alone.sample_packing_group_size, alone.datasets[0].max_seq_len) == (1, 512)
    assert run_of(TRL, packing=True).data.sample_packing_group_size > 1
    assert run_of(LLAMA_FACTORY).data.sample_packing_group_size == 1
    assert run_of(LLAMA_FACTORY, stage="pt").data.sample_packing_group_size > 1
    pairs = run_of(TRL_DPO, max_length=512).data
    assert pairs.sample_packing_sequence_len == 1024


@pytest.mark.parametrize(
    ("keys", "evaluates", "saves"),
    [
        ({"eval_strategy": "steps", "eval_steps": 5}, (5, 0), (500, 0)),
        ({"eval_strategy": "steps", "logging_steps": 7}, (7, 0), (500, 0)),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, (0, 1), (0, 1)),
        ({"eval_strategy": "steps", "eval_steps": 0.5, "save_strategy": "no"}, (0, 1.5), (0, 0)),
        ({"save_steps": 0.25, "max_steps": 40}, (0, 0), (10, 0)),
    ],
)
def test_evaluations_and_checkpoints_come_when_they_come_there(
    keys: dict[str, Any], evaluates: tuple[int, float], saves: tuple[int, float]
) -> None:
    train = run_of(LLAMA_FACTORY, val_size=0.1, **keys).train
    assert (train.eval_steps, train.eval_epochs) == evaluates
    assert (train.save_steps, train.save_epochs) == saves


def test_wishes_for_evaluations_are_left_out_where_nothing_is_held_out() -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    without = run_of(LLAMA_FACTORY, eval_strategy="epoch", **best).train
    assert (without.eval_epochs, without.save_best.metric) == (0, None)
    held = run_of(LLAMA_FACTORY, eval_strategy="epoch", val_size=9, **best).train
    assert (held.eval_epochs, held.save_best.metric) == (1, "eval_loss")


@pytest.mark.parametrize(
    ("keys", "optimizer", "kind"),
    [
        ({"optim": "paged_adamw_32bit"}, "adamw", "translated"),
        ({"optim": "adamw_8bit"}, "adamw", "approximated"),
        ({"optim": "lion_8bit"}, None, "left out"),
        ({"optim": "adafactor"}, None, "left out"),
        ({"optim": "rmsprop"}, "torch.optim.RMSprop", "approximated"),
        ({"optim": "adamw_anyprecision"}, "anyprecision_adamw", "translated"),
    ],
)
def test_optimizers_are_the_same_or_told(
    keys: dict[str, Any], optimizer: str | None, kind: str
) -> None:
    found = translated(TRL, **keys)
    assert line_of(found, "optim").kind == kind
    assert found.settings["train"].get("optimizer") == optimizer


def test_weight_decay_leaves_alone_what_the_trainer_leaves_alone() -> None:
    config = LlamaConfig(
        **{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 8},
        **{"intermediate_size": 8, "attention_bias": True},
    )
    model = LlamaForCausalLM(config)
    # It asks nothing of the trainer it is a method of.
    theirs = set(Trainer.get_decay_parameter_names(cast("Trainer", None), model))
    train = run_of(TRL, weight_decay=0.1).train
    grouping = Grouping(train.weight_decay, train.no_decay_modules, train.no_decay_params)
    groups = parameter_groups(model.named_parameters(), grouping)
    ours = {name for group in groups if group["weight_decay"] for name, _ in group["params"]}
    assert ours == theirs
    assert 0 < len(ours) < len(list(model.parameters()))


def test_sharding_is_as_far_as_deepspeed_and_fsdp_say() -> None:
    def train_of(**keys: Any) -> tuple[str, int | None, bool]:
        train = run_of(LLAMA_FACTORY, **keys).train
        return train.data_parallel_mode, train.zero_stage, train.enable_fsdp_offload

    assert train_of(deepspeed="examples/ds_z2_config.json") == ("fsdp2", 2, False)
    assert train_of(deepspeed="zero3.json") == ("fsdp2", 3, False)
    inside = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert train_of(deepspeed=inside) == ("fsdp2", 2, True)
    assert train_of(deepspeed="ds_z0_config.json") == ("ddp", None, False)
    assert train_of(fsdp=["shard_grad_op", "auto_wrap"]) == ("fsdp2", 2, False)


def test_trl_trains_the_whole_of_conversations_unless_it_says_otherwise() -> None:
    assert run_of(TRL).data.train_on_prompt
    assert not run_of(TRL, assistant_only_loss=True).data.train_on_prompt
    text = run_of(TRL, dataset_text_field="body").data.datasets[0]
    assert (text.type, text.field_text) == ("text", "body")
    answers = run_of(TRL, completion_only_loss=True).data
    assert (answers.datasets[0].field_output, answers.train_on_prompt) == ("completion", False)


def test_trl_reads_several_data_sets() -> None:
    parts = [
        {"id": "a/b", "config": "default", "split": "train_prefs", "columns": ["chosen"]},
        {"path": "c.jsonl", "weight": 0.5},
    ]
    found = translated(
        TRL_DPO, dataset_mixture={"datasets": parts, "test_split_size": 9, "seed": 0}
    )
    data = loads(found.settings).data
    assert [(source.path, source.type) for source in data.datasets] == [
        ("a/b", "preference"),
        ("c.jsonl", "preference"),
    ]
    assert (data.datasets[0].name, data.datasets[0].split) == ("default", "train_prefs")
    assert data.val_set_size == 9
    assert data.datasets[1].shards == 2
    assert line_of(found, "dataset_mixture.datasets.1.weight").kind == "approximated"


@pytest.mark.parametrize("dialect", [TRL, LLAMA_FACTORY, AXOLOTL], ids=lambda one: one.name)
def test_each_machine_speaks_where_its_trainer_would(dialect: Dialect) -> None:
    assert run_of(dialect, log_on_each_node=True).train.log_ranks == "local0"
    assert run_of(dialect, log_on_each_node=False).train.log_ranks == "global0"


def test_files_of_training_by_rewards_are_refused_by_each_key_that_says_so() -> None:
    of_rewards = {field.name for field in dataclasses.fields(trl.GRPOConfig)} - {
        field.name
        for config in (trl.SFTConfig, trl.DPOConfig)
        for field in dataclasses.fields(config)
    }
    for key in of_rewards - {"max_completion_length", "chat_template_kwargs"}:
        values = {"model_name_or_path": "m", "dataset_name": "d", "beta": 0.04, key: 8}
        assert detect_dialect({**values, "num_generations": 8}) is TRL
        assert key in {line.key for line in translate(values, TRL, GPUS).of("refused")}, key


def test_lengths_of_a_file_without_data_are_those_of_the_data_that_is_to_be_written(
    tmp_path: Path,
) -> None:
    file = tmp_path / "arguments.yaml"
    lines = ["model_name_or_path: m", "beta: 0.1", "max_prompt_length: 512", "bf16: true"]
    lengths = ["max_length: 1024", "max_seq_length: 4096", "learning_rate: 1e-6"]
    file.write_text("\n".join([*lines, *lengths]))
    found = load_translation(file, None, GPUS)
    assert not found.of(*GAPS)
    assert found.placeholders["data.datasets"][0]["max_seq_len"] == 1024
    assert found.settings["data"]["max_prompt_len"] == 512


def test_a_model_of_ours_without_weights_begins_at_random_ones() -> None:
    found = translated(TRL, model_name_or_path="builtin:tiny-qwen3")
    assert found.settings["model"] == {"config_path": "builtin:tiny-qwen3"}
    assert found.origins("model.config_path") == ("model_name_or_path",)


def test_a_file_of_kto_is_not_trained_as_pairs() -> None:
    values = {"model_name_or_path": "m", "dataset_name": "d", "desirable_weight": 1.0}
    assert detect_dialect(values) is TRL_DPO
    assert [line.key for line in translate(values, TRL_DPO, GPUS).of(*GAPS)] == ["desirable_weight"]


def test_trls_losses_may_have_cross_entropy_beside_them() -> None:
    mixed = run_of(TRL_DPO, loss_type=["ipo", "sft"], loss_weights=[0.5, 0.25]).preference
    assert (mixed.loss_type, mixed.pref_loss_ratio, mixed.sft_loss_ratio) == ("ipo", 0.5, 0.25)
    two = translated(TRL_DPO, loss_type=["sigmoid", "ipo"])
    assert line_of(two, "loss_type").kind in GAPS


def test_adapters_are_asked_for_in_the_words_of_each() -> None:
    trl = run_of(TRL, use_peft=True, load_in_4bit=True).lora
    assert (trl.lora_rank, trl.lora_alpha, trl.quant_format) == (16, 32, "nf4")
    assert trl.lora_target_modules == ["q_proj", "v_proj"]
    factory = run_of(LLAMA_FACTORY, finetuning_type="lora", quantization_bit=8).lora
    assert (factory.lora_rank, factory.lora_alpha, factory.quant_format) == (8, 16, "int8")
    assert factory.lora_target_modules == "all-linear"
    keys = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}
    axolotl = run_of(AXOLOTL, adapter="qlora", load_in_4bit=True, **keys).lora
    assert (axolotl.lora_rank, axolotl.enable_qlora, axolotl.quant_format) == (4, True, "nf4")
    assert axolotl.missing_targets == "refuse"
    for dialect, name in ((TRL, "lora_target_modules"), (LLAMA_FACTORY, "lora_target")):
        switch = {"use_peft": True} if dialect is TRL else {"finetuning_type": "lora"}
        lora = run_of(dialect, **switch, **{name: ["q_proj", "fc1"]}).lora
        assert (lora.lora_target_modules, lora.missing_targets) == (["q_proj", "fc1"], "skip")
    unread = translated(TRL, lora_r=4)
    assert line_of(unread, "lora_r").kind == "no effect"


@pytest.mark.parametrize(
    ("rl", "loss"), [("dpo", "sigmoid"), ("ipo", "ipo"), ("orpo", "orpo"), ("simpo", "simpo")]
)
def test_axolotl_learns_preferences_by_the_same_loss(rl: str, loss: str) -> None:
    pairs = [{"path": "d", "type": "chat_template.default"}]
    run = run_of(AXOLOTL, rl=rl, datasets=pairs)
    assert (run.train.objective, run.preference.loss_type) == ("preference", loss)
    assert run.data.datasets[0].type == "preference"


@pytest.mark.parametrize(
    ("dialect", "size"),
    [
        (TRL, "per_device_train_batch_size"),
        (LLAMA_FACTORY, "per_device_train_batch_size"),
        (AXOLOTL, "micro_batch_size"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_batch_size_that_is_found_leaves_the_rows_of_a_step_alone(
    dialect: Dialect, size: str
) -> None:
    batch = {size: 8, "gradient_accumulation_steps": 4}
    train = run_of(dialect, **batch, auto_find_batch_size=True).train
    assert (train.micro_batch_size, train.global_batch_size) == ("auto", 64)
    assert train.gradient_accumulation_steps == 1
    told = translated(dialect, **batch, auto_find_batch_size=True)
    assert line_of(told, "auto_find_batch_size").kind == "approximated"
    assert line_of(told, size).kind == "approximated"
    assert run_of(dialect, **batch, auto_find_batch_size=False).train.micro_batch_size == 8


def test_losses_of_others_are_computed_as_they_compute_them() -> None:
    pairs = [{"path": "d", "type": "chat_template.default"}]
    orpo = run_of(AXOLOTL, rl="orpo", datasets=pairs, orpo_alpha=0.2).preference
    assert (orpo.sft_loss_scope, orpo.pref_loss_ratio) == ("prompt_and_answer", 0.2)
    judged = [{"path": "d", "type": "user_defined.default"}]
    kto = run_of(AXOLOTL, rl="kto", datasets=judged, micro_batch_size=3).preference
    assert (kto.kl_pairing, kto.kl_rotation_size) == ("rotate", 3)
    factory = run_of(LLAMA_FACTORY, stage="kto", preprocessing_batch_size=50).preference
    assert (factory.kl_pairing, factory.kl_rotation_size) == ("rotate", 50)
    assert run_of(LLAMA_FACTORY, stage="kto").preference.kl_rotation_size == 1000


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"type": "chat_template", "field_messages": "turns"}, "chat"),
        ({"type": "completion", "field": "body"}, "text"),
        ({"type": {"field_instruction": "q", "field_output": "a"}}, "instruction"),
        ({}, "tokenized"),
    ],
)
def test_axolotls_types_are_ours(source: dict[str, Any], kind: str) -> None:
    assert run_of(AXOLOTL, datasets=[{"path": "d", **source}]).data.datasets[0].type == kind


def test_each_key_of_an_axolotl_data_set_has_a_line() -> None:
    found = translated(AXOLOTL, datasets=[{"path": "d", "type": "alpaca", "drop_sytem_message": 1}])
    assert line_of(found, "datasets.0.path").names == ["data.datasets.0.path"]
    line = line_of(found, "datasets.0.drop_sytem_message")
    assert (line.kind, line.why) == (
        "unknown",
        "is not a known key of datasets; did you mean drop_system_message?",
    )
    unknown = translated(AXOLOTL, datasets=[{"path": "d", "type": "own.prompt"}])
    assert line_of(unknown, "datasets.0.type").kind == "refused"


@pytest.mark.parametrize(
    ("item", "source"),
    [
        ({"message_property_mappings": {"role": "from", "content": "value"}}, {"type": "sharegpt"}),
        ({"message_field_role": "from", "message_field_content": "value"}, {"type": "sharegpt"}),
        ({"message_property_mappings": {"role": "role"}}, {"type": "chat"}),
        (
            {"message_property_mappings": {"role": "who", "content": "what"}},
            {"field_message_role": "who", "field_message_content": "what"},
        ),
        ({"roles": {"assistant": ["gpt", "bot"]}}, {"message_roles": {"assistant": ["bot"]}}),
        ({"message_field_training": "kept"}, {"field_message_training": "kept"}),
        (
            {"message_field_training_detail": "parts"},
            {"field_message_training_detail": "parts"},
        ),
        ({"drop_system_message": True}, {"drop_system_message": True}),
        ({"roles_to_train": ["gpt", "human"]}, {"roles_to_train": ["assistant", "user"]}),
        ({"train_on_eos": "last"}, {"train_on_eos": "last"}),
        ({"train_on_eos": "turn", "train_on_eot": "none"}, {"train_on_eos": "none"}),
        ({"field_system": "instructions"}, {"field_system": "instructions"}),
    ],
    ids=str,
)
def test_axolotl_says_how_messages_are_read_and_which_are_trained(
    item: dict[str, Any], source: dict[str, Any]
) -> None:
    found = translated(AXOLOTL, datasets=[{"path": "d", "type": "chat_template", **item}])
    [dataset] = found.settings["data"]["datasets"]
    assert {name: dataset[name] for name in source} == source
    assert not found.of(*GAPS)
    loads(found.settings)


@pytest.mark.parametrize(
    ("keys", "objective", "kind", "loss"),
    [
        ({"stage": "sft"}, "sft", None, "sigmoid"),
        ({"stage": "pt"}, "pretrain", "text", "sigmoid"),
        ({"stage": "dpo", "pref_loss": "simpo"}, "preference", "preference", "simpo"),
        ({"stage": "kto", "pref_beta": 0.2}, "preference", "kto", "kto"),
    ],
)
def test_stages_of_llama_factory_are_objectives(
    keys: dict[str, Any], objective: str, kind: str | None, loss: str
) -> None:
    run = run_of(LLAMA_FACTORY, **keys)
    assert run.train.objective == objective
    assert run.data.datasets[0].type == kind
    assert run.preference.loss_type == loss


def test_muon_of_llama_factory_is_ours_at_the_same_rate() -> None:
    train = run_of(LLAMA_FACTORY, use_muon=True, learning_rate=1e-4).train
    assert (train.optimizer, train.muon_lr, train.lr) == ("muon", 1e-4, 1e-4)
    assert run_of(LLAMA_FACTORY, use_muon=False).train.optimizer == "adamw"


def test_llama_factory_freezes_the_parts_that_are_named_or_the_usual_ones() -> None:
    for keys, frozen in (
        ({"freeze_vision_tower": True}, None),
        ({"freeze_vision_tower": False}, ["projector"]),
        ({"freeze_multi_modal_projector": False}, ["vision"]),
        (
            {"freeze_language_model": True, "freeze_multi_modal_projector": False},
            ["vision", "language"],
        ),
        ({"freeze_vision_tower": False, "freeze_multi_modal_projector": False}, []),
        ({"train_mm_proj_only": True}, ["vision", "language"]),
    ):
        assert run_of(LLAMA_FACTORY, **keys).model.freeze == frozen
    adapted = {"finetuning_type": "lora", "freeze_vision_tower": False}
    assert run_of(LLAMA_FACTORY, **adapted).model.freeze is None


def test_images_are_where_llama_factory_says_and_are_cut_as_by_the_processor() -> None:
    found = run_of(LLAMA_FACTORY, stage="sft", media_dir="pictures").data.datasets
    assert [one.image_folder for one in found] == ["pictures"]
    for key in ("crop_to_patches", "video_max_pixels"):
        line = line_of(translated(LLAMA_FACTORY, **{key: 1024}), key)
        assert line.kind in GAPS
        assert "preprocessor_config.json" in line.why


def test_pixels_and_frames_of_llama_factory_are_those_of_data_sets_with_images_or_videos() -> None:
    info = {
        name: {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", name: name},
        }
        for name in ("images", "videos")
    }
    info["texts"] = {"file_name": "texts.json", "formatting": "sharegpt"}
    written = {"image_max_pixels": 1024, "image_min_pixels": 16, "video_maxlen": 8}
    named = {"dataset": "texts, images, videos", "dataset_dir": info}
    texts, images, videos = run_of(LLAMA_FACTORY, **written, **named).data.datasets
    assert texts.image_max_pixels is None
    assert (images.image_min_pixels, images.image_max_pixels, images.video_fps) == (16, 1024, None)
    assert (videos.image_max_pixels, videos.video_max_frames, videos.video_fps) == (None, 8, 2.0)
    assert run_of(LLAMA_FACTORY, **written, **named, video_fps=4).data.datasets[2].video_fps == 4.0
    line = line_of(translated(LLAMA_FACTORY, **written, **named), "video_maxlen")
    assert (line.kind, line.names) == ("approximated", ["data.datasets.2.video_max_frames"])
    alone = translated(LLAMA_FACTORY, **written, dataset="texts", dataset_dir=info)
    assert line_of(alone, "image_max_pixels").kind == "no effect"


def test_axolotl_trains_all_parts_of_a_model_with_a_processor() -> None:
    images = {"processor_type": "AutoProcessor", "skip_prepare_dataset": True}
    run = run_of(AXOLOTL, **images)
    assert run.model.freeze == []
    assert not run.data.skip_prepare_dataset
    assert run_of(AXOLOTL, **images, freeze_mm_modules=True).model.freeze is None
    assert run_of(AXOLOTL, **images, adapter="lora").model.freeze is None
    for keys in (
        {"image_size": 512},
        {"image_resize_algorithm": "box"},
    ):
        [(key, _)] = keys.items()
        assert line_of(translated(AXOLOTL, **keys), key).kind in GAPS


def test_weights_in_8_bits_are_gathered_where_products_have_8_bits() -> None:
    wish = {"fp8_enable_fsdp_float8_all_gather": True}
    train = run_of(LLAMA_FACTORY, fp8=True, **wish).train
    assert train.enable_fp8_training
    assert (train.enable_fp8_all_gather, train.fp8.recipe) == (True, "tensorwise")
    assert not run_of(LLAMA_FACTORY, **wish).train.enable_fp8_all_gather


def test_events_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"report_to": ["tensorboard"], "logging_dir": "logs"}
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    without = translated(TRL, **keys)
    assert "use_tensorboard" not in without.settings["train"]
    assert "not installed" in line_of(without, "report_to").why
    monkeypatch.setattr(trackers, "find_spec", lambda _: "here")
    assert run_of(TRL, **keys).train.log_dir == "logs"


def test_stages_that_are_not_here_are_refused() -> None:
    assert line_of(translated(LLAMA_FACTORY, stage="ppo"), "stage").kind in GAPS
    assert line_of(translated(AXOLOTL, rl="grpo"), "rl").kind in GAPS
    assert line_of(translated(AXOLOTL, neftune_noise_alpha=5), "neftune_noise_alpha").why
