"""Files of ERNIEKit's: every key of theirs has a meaning here, or a word why it has none."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading.load import load, loads
from penstock.config.translate.apply import translate
from penstock.config.translate.erniekit.rules import ERNIEKIT
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import GAPS, Line, Translation, value_at
from penstock.core.errors import ConfigError
from penstock.engine.distributed.parallel_dims import (
    accumulation_steps,
    build_parallel_dims,
    rows_per_step,
)
from penstock.optim.schedule import lr_at
from tests.config.dialects.erniekit_keys import CHANGES, IDLE

SHARED = Path(__file__).parents[4] / "shared"
EXAMPLES = sorted((SHARED / "examples" / "erniekit").glob("*.yaml"))
VECTORS = SHARED / "spec" / "lr_vectors.json"
MAP = SHARED / "spec" / "dialect_map.yaml"

ROWS = {
    "ERNIE-4.5-300B-A47B__dpo__run_dpo_32k": (112, 36),
    "ERNIE-4.5-21B-A3B__dpo__run_dpo_8k": (8, 8),
}
"""Ranks that one copy of the model is cut over there, and the rows of its step."""

GPUS = Devices(ranks=8)
BASE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "train_dataset_path": "a.jsonl",
    "output_dir": "out",
    "max_seq_len": 1024,
}


def translated(**keys: Any) -> Translation:
    return translate({**BASE, **keys}, ERNIEKIT, GPUS)


def line_of(translation: Translation, key: str) -> Line:
    return next(line for line in translation.lines if line.key == key)


@pytest.mark.skipif(not VECTORS.is_file(), reason="needs ../shared/spec/lr_vectors.json")
def test_rates_are_those_of_their_schedules() -> None:
    names = {"num_warmup_steps": "warmup_steps", "num_training_steps": "max_steps"}
    for case in json.loads(VECTORS.read_text())["ernie"]:
        keys = {names.get(name, name): value for name, value in case["args"].items()}
        asked = {"max_steps": 100, "learning_rate": case["lr"], **keys}
        found = translated(lr_scheduler_type=case["lr_scheduler_type"], **asked)
        train = loads(found.settings).train
        # A run of 100 steps has none after 99.
        want = {int(step): rate for step, rate in case["lr_at"].items() if int(step) < 100}
        got = [lr_at(step, 100, train) for step in want]
        assert got == pytest.approx(list(want.values()), rel=1e-9), case


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_says_something_changes_the_run_or_is_told(key: str) -> None:
    value, beside = CHANGES[key]
    with_it = translated(**{**beside, key: value})
    without = translate({k: v for k, v in {**BASE, **beside}.items() if k != key}, ERNIEKIT, GPUS)
    line = line_of(with_it, key)
    assert line.kind not in ("unknown", "no effect"), line
    if line.kind in ("approximated", *GAPS):
        assert line.why
    elif not (key in ("continue_training", "unified_checkpoint") or line.why):
        assert with_it.settings != without.settings


@pytest.mark.parametrize("key", sorted(IDLE))
def test_a_key_that_changes_nothing_says_why(key: str) -> None:
    with_it = translated(**{key: "1"})
    line = line_of(with_it, key)
    assert line.kind == "no effect"
    assert len(line.why) > 10
    assert with_it.settings == translated().settings


def test_a_recipe_for_images_may_have_texts_alone() -> None:
    texts = {"stage": "VL-SFT", "train_dataset_path": "", "train_dataset_prob": ""}
    texts |= {"text_dataset_path": "a.jsonl,b.jsonl", "text_dataset_prob": "0.2,0.8"}
    found = translated(**texts, modality_ratio="[1,1]", dataset_name="FunctionCallSFTReader")
    assert not found.of(*GAPS)
    assert [(s["path"], s["type"], s["weight"]) for s in found.settings["data"]["datasets"]] == [
        ("a.jsonl", "chat", 0.2), ("b.jsonl", "chat", 0.8),
    ]  # fmt: skip
    both = translated(**{**texts, "train_dataset_path": "c.jsonl", "train_dataset_prob": "1"})
    assert {line.key for line in both.of("refused")} == {"text_dataset_path", "text_dataset_prob"}


def test_tokenized_data_is_refused_with_what_to_write() -> None:
    keys = {"dataset_type": "pretrain", "input_dir": "1.0 tokens", "split": "998,1,1"}
    named = {key: value for key, value in BASE.items() if key != "train_dataset_path"}
    [line] = translate({**named, "stage": "PT", **keys}, ERNIEKIT, GPUS).of(*GAPS)
    assert (line.key, "train_dataset_path" in line.why) == ("input_dir", True)


def test_these_are_all_keys_that_are_known() -> None:
    assert {*CHANGES, *IDLE} == ERNIEKIT.keys


@pytest.mark.skipif(not MAP.is_file(), reason="needs ../shared/spec/dialect_map.yaml")
def test_every_key_that_is_documented_is_known() -> None:
    rows = [row for row in yaml.safe_load(MAP.read_text()) if row["dialect"] == "erniekit"]
    assert len(rows) > 150
    assert {row["key"] for row in rows} <= ERNIEKIT.keys
    idle = {row["key"] for row in rows if row["in_seed"] and row["kind"] == "noop"}
    assert idle <= IDLE


@pytest.mark.skipif(not EXAMPLES, reason="needs ../shared/examples")
@pytest.mark.parametrize("ranks", [1, 6, 8, 112])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_published_files_are_runs(file: Path, ranks: int) -> None:
    translation = load_translation(file, None, Devices(ranks))
    assert translation.dialect == "erniekit"
    assert not translation.of(*GAPS)
    train = loads(translation.settings).train
    degrees = build_parallel_dims(train, translation.ranks)
    assert accumulation_steps(train, degrees.num_replicas) >= 1
    cut, rows = ROWS.get(file.stem, (0, 0))
    if ranks <= cut:
        assert rows_per_step(train, degrees.num_replicas) == rows


def test_a_key_of_the_program_stands_before_one_of_the_documentation() -> None:
    both = translated(
        **{"lora": True, "fine_tuning": "Full", "bf16": False, "compute_type": "fp16"},
        **{"per_device_train_batch_size": 4, "batch_size": 2},
    )
    run = loads(both.settings)
    assert not run.lora.enable_lora
    assert run.train.precision == "fp16_mixed"
    assert run.train.micro_batch_size == 2
    for weak, strong in [("lora", "fine_tuning"), ("per_device_train_batch_size", "batch_size")]:
        assert line_of(both, weak).kind == "no effect"
        assert strong in line_of(both, weak).why
    documented = loads(translated(lora=True, bf16=True).settings)
    assert documented.lora.enable_lora
    assert documented.train.precision == "bf16_mixed"
    assumed = translated()
    assert {"lora", "bf16", "adam_beta2", "weight_decay", "recompute"} <= {
        line.key for line in assumed.of("assumed")
    }
    assert not loads(assumed.settings).lora.enable_lora


def test_adapters_scale_as_they_do_there() -> None:
    def lora(**keys: Any) -> tuple[float, bool, float]:
        found = loads(translated(fine_tuning="LoRA", **keys).settings).lora
        return found.lora_alpha, found.use_rslora, found.lora_plus_ratio

    assert lora(lora_rank=32) == (64, False, 1.0)
    assert lora(lora_rank=32, rslora=True) == (4, True, 1.0)
    assert lora(lora_alpha=10, lora_plus_scale=12) == (10, False, 12)
    assert lora(lora_alpha=10, lora_plus_scale=12, rslora_plus=True) == (4, True, 4.0)


@pytest.mark.parametrize(
    ("keys", "style", "least", "warmup"),
    [
        ({}, "linear", 0.0, 0),
        ({"lr_scheduler_type": "cosine", "min_lr": 1e-6, "warmup_steps": 9}, "cosine", 1e-6, 9),
        ({"lr_scheduler_type": "cosine"}, "cosine", 0.0, 0),
        ({"lr_scheduler_type": "linear", "min_lr": 1e-6}, "linear", 0.0, 0),
        ({"lr_scheduler_type": "polynomial"}, "polynomial", 1e-7, 0),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "constant", 1e-7, 0),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, "constant", 1e-7, 9),
    ],
)
def test_schedules_read_what_theirs_read(
    keys: dict[str, Any], style: str, least: float, warmup: int
) -> None:
    train = loads(translated(**keys).settings).train
    assert (train.lr_decay_style, train.lr_min, train.lr_warmup_steps) == (style, least, warmup)


def test_sources_keep_their_shares_where_they_are_drawn_by_them() -> None:
    two = {"train_dataset_path": "a.jsonl, b.jsonl", "train_dataset_prob": "0.25,0.75"}
    drawn = loads(translated(**two, max_steps=5).settings).data
    assert [(one.path, one.weight) for one in drawn.datasets] == [
        ("a.jsonl", 0.25),
        ("b.jsonl", 0.75),
    ]
    assert (drawn.mix_strategy, drawn.samples_per_epoch) == ("random", 6_000_000)
    once = loads(translated(**two, mix_strategy="concat").settings).data
    assert [one.weight for one in once.datasets] == [1, 1]
    two["train_dataset_prob"] = "0,1"
    left_out = loads(translated(**two, mix_strategy="concat").settings).data
    assert [one.weight for one in left_out.datasets] == [0, 1]
    uneven = translated(**{**two, "train_dataset_prob": "1.0"})
    assert "write a number for each" in line_of(uneven, "train_dataset_prob").why


def test_a_recipe_for_images_trains_what_it_says_on_data_of_its_form() -> None:
    images = {"stage": "VL-SFT", "multimodal": True, "one_sample_in_one_seq": True}
    run = loads(translated(**images, freeze_config="freeze_vision", fine_tuning="Full").settings)
    assert (run.train.objective, run.model.freeze) == ("sft", ["vision"])
    assert (run.data.datasets[0].type, run.data.sample_packing_group_size) == ("sft_turns", 1)
    assert loads(translated(**images, freeze_config="").settings).model.freeze == []
    adapted = translated(**images, freeze_config="freeze_vision", fine_tuning="LoRA")
    assert line_of(adapted, "freeze_config").kind == "approximated"
    assert loads(adapted.settings).model.freeze is None
    other = translated(**images, freeze_config="freeze_vision freeze_lm")
    assert line_of(other, "freeze_config").why == "freeze_lm: it takes freeze_vision"
    frozen = translated(**images, freeze_config="freeze_vision", vit_lr_ratio=0.9)
    assert line_of(frozen, "vit_lr_ratio").kind == "no effect"


def test_stages_of_layers_are_counted_without_the_embedding() -> None:
    run = loads(translated(pipeline_parallel_degree=2, pp_seg_method="[0,14,29]").settings)
    assert run.train.pipeline_parallel_split == [0, 13]
    other = translate(
        {**BASE, "pipeline_parallel_degree": 4, "pp_seg_method": [0, 7, 14, 21, 29]},
        ERNIEKIT,
        Devices(2),
    )
    assert loads(other.settings).train.pipeline_parallel_split == "uniform"
    assert "4 stages" in line_of(other, "pp_seg_method").why


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"stage": "OCR-VL-SFT"}, "stage"),
        ({"fine_tuning": "Full", "compute_type": "wint8"}, "compute_type"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps"),
        ({"max_steps": "many"}, "max_steps"),
        ({"lr_scheduler_type": "wavy"}, "lr_scheduler_type"),
        ({"fine_tuning": "lora"}, "fine_tuning"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(keys: dict[str, Any], refused: str) -> None:
    assert [line.key for line in translated(**keys).of(*GAPS)] == [refused]


@pytest.mark.parametrize(
    "keys",
    [{"beta": 0.1}, {"reference_free": True}, {"simpo_gamma": 1.0}, {"max_prompt_len": 100}],
)
def test_a_file_with_keys_of_dpo_and_no_stage_is_one_of_dpo(keys: dict[str, Any]) -> None:
    found = translated(**keys)
    assert loads(found.settings).train.objective == "preference"
    assert found.settings["data"]["datasets"][0]["type"] == "preference_turns"
    line = line_of(found, "stage")
    assert (line.kind, line.value) == ("assumed", "DPO")
    assert next(iter(keys)) in line.why
    said = translated(**keys, stage="SFT")
    assert loads(said.settings).train.objective == "sft"
    assert translated().settings["train"]["objective"] == "sft"


@pytest.mark.parametrize(
    ("keys", "setting", "value"),
    [
        ({"greedy_intokens": True}, "data.sample_packing_method", "greedy"),
        ({"greedy_intokens": True}, "data.sample_packing_group_size", 500),
        ({"greedy_intokens": False}, "data.sample_packing_method", "sequential"),
        ({"packing": False}, "data.sample_packing_group_size", 1),
        (
            {"stage": "DPO", "ref_model_update_steps": 10},
            "preference.ref_update_steps",
            10,
        ),
        (
            {"pipeline_parallel_degree": 2, "add_tail_layers": 3},
            "train.pipeline_parallel_output_weight",
            4,
        ),
        ({"disable_ckpt_quant": False, "ckpt_quant_stage": "O1"}, "train.ckpt_quant", "int8"),
        (
            {"moe_multimodal_dispatch_use_allgather": "v2-alltoall-unpad"},
            "model.ep_dispatch",
            "alltoall",
        ),
    ],
)
def test_these_keys_do_what_they_say(keys: dict[str, Any], setting: str, value: Any) -> None:
    found = translated(**keys)
    assert value_at(found.settings, setting) == value
    assert not [line for line in found.of("approximated", *GAPS) if line.key in keys]
    loads(found.settings)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"stage": "DPO", "offset_alpha": 0.5}, "needs a score for each answer"),
        ({"compute_type": "fp8", "apply_online_actscale_step": 100}, "in every step"),
        ({"compute_type": "fp8", "actscale_moving_rate": 0.5}, "in every step"),
        ({"moe_multimodal_dispatch_use_allgather": "v3"}, "it takes v2-alltoall-unpad"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**BASE, **keys}))
    with pytest.raises(ConfigError, match=why):
        load(file)


@pytest.mark.parametrize(
    "keys",
    [
        {"compute_type": "fp8", "apply_online_actscale_step": 200},
        {"disable_ckpt_quant": False},
        {"stage": "DPO", "offset_alpha": 0.0},
        {"add_tail_layers": 0},
    ],
)
def test_a_documented_default_without_an_effect_here_is_accepted(keys: dict[str, Any]) -> None:
    *above, last = keys
    found = translated(**keys)
    assert line_of(found, last).kind == "no effect"
    assert found.settings == translated(**{key: keys[key] for key in above}).settings


def test_an_evaluation_has_as_many_rows_as_their_batches() -> None:
    # Four replicas of 2 ranks each, 3 rows on each, 5 batches; a training step has 4 x 1 x 8 rows.
    found = translated(
        **{"do_eval": True, "eval_dataset_path": "e.jsonl", "max_evaluate_steps": 5},
        **{"per_device_eval_batch_size": 3, "gradient_accumulation_steps": 8},
        **{"tensor_parallel_degree": 2, "sharding": "stage1", "sharding_parallel_degree": 4},
    )
    train = loads(found.settings).train
    assert (train.eval_max_batches, train.eval_rows_per_batch) == (5, 12)
    assert line_of(found, "max_evaluate_steps").kind == "translated"


def test_a_file_without_training_data_trains_on_none_and_may_evaluate(tmp_path: Path) -> None:
    values = {"model_name_or_path": "m", "fine_tuning": "LoRA", "do_eval": True}
    values |= {"eval_dataset_path": "e.jsonl", "output_dir": "out"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**values, "do_train": True}))
    found = load_translation(file, None, Devices(1))
    assert "data.datasets" in found.placeholders
    file.write_text(yaml.safe_dump({**values, "do_train": False}))
    found = load_translation(file, None, Devices(1))
    assert loads(found.settings).train.eval_only
    line = line_of(found, "eval_dataset_path")
    assert line.kind == "approximated"
    assert "stand for those of training" in line.why


def test_a_file_that_neither_trains_nor_evaluates_is_refused() -> None:
    line = line_of(translated(do_train=False), "do_train")
    assert line.kind == "refused"
    assert "write do_train: true" in line.why
    evaluated = translated(do_train=False, do_eval=True, eval_dataset_path="e.jsonl")
    assert loads(evaluated.settings).train.eval_only


def test_what_the_text_and_the_program_say_of_dropouts_warmup_is_doubtful() -> None:
    found = translated(hidden_dropout_prob=0.1, dropout_warmup_steps=10)
    assert line_of(found, "dropout_warmup_steps").kind == "doubtful"
    dropout = loads(found.settings).train.dropout
    assert (dropout.hidden, dropout.warmup_steps) == (0.1, 10)
