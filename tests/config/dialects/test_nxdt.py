"""Files of NxDT's: every key of theirs has a meaning here, or a word why it has none."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from penstock.config.loading import yaml12
from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.config.translate.apply import translate
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.interpolation import resolve_references
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.nxdt.rules import NXDT
from penstock.config.translate.translation import GAPS, Line, Translation, value_at
from penstock.estimate.machine import check_foundation_entries, check_machine, resolve_hf_config
from penstock.models.decoder_config import LearnedPositions
from penstock.models.registry import get_family
from penstock.optim.schedule import lr_at
from tests.config.dialects.nxdt_keys import (
    CHANGES,
    DPO,
    IDLE,
    LORA,
    MAPPED,
    MEGATRON,
    ORPO,
    PEFT,
    SCHEDULE,
    SFT,
)
from tests.models.twins import ours_with, packed_logits, their_logits

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
EXAMPLES = sorted((SHARED / "examples" / "nxdt").glob("*.yaml"))
MAP = SHARED / "spec" / "dialect_map.yaml"
VECTORS = SHARED / "spec" / "lr_vectors.json"

EXAMPLE = yaml12.parse((ROOT / "configs" / "foreign" / "nxdt.yaml").read_text()).value
BASE = dict(resolve_references(EXAMPLE))
GPUS = Devices(ranks=8)


def changed(keys: dict[str, Any]) -> dict[str, Any]:
    """The example with other values under these dotted keys; null takes a key away."""
    values = deepcopy(BASE)
    for key, value in keys.items():
        *above, last = key.split(".")
        at = values
        for step in above:
            at = at.setdefault(step, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return values


def translated(keys: dict[str, Any]) -> Translation:
    return translate(changed(keys), NXDT, GPUS)


def run_of(keys: dict[str, Any]) -> RunConfig:
    return loads(translated(keys).settings)


def line_of(translation: Translation, key: str) -> Line:
    return next(line for line in translation.lines if line.key == key)


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_says_something_changes_the_run_or_is_told(key: str) -> None:
    value, beside = CHANGES[key]
    values = changed(beside)
    *above, last = key.split(".")
    at = values
    for step in above:
        at = at.setdefault(step, {})
    at.pop(last, None)
    without = translate(values, NXDT, GPUS)
    at[last] = value
    with_it = translate(values, NXDT, GPUS)
    line = line_of(with_it, key)
    assert line.kind not in ("unknown", "no effect"), line
    if line.kind in ("approximated", *GAPS):
        assert line.why
    elif not line.why:
        assert with_it.settings != without.settings


@pytest.mark.parametrize("key", sorted(IDLE))
def test_a_key_that_changes_nothing_says_why(key: str) -> None:
    beside = LORA if key.startswith(PEFT) else {}
    with_it = translated({**beside, key: "1"})
    line = line_of(with_it, key)
    assert line.kind == "no effect"
    assert len(line.why) > 10
    assert with_it.settings == translated({**beside, key: None}).settings


def test_the_tables_have_no_other_keys_and_none_twice() -> None:
    assert {*CHANGES, *IDLE} == NXDT.keys
    tables = (NXDT.same, NXDT.computed, NXDT.unsupported, NXDT.idle)
    assert len(CHANGES) + len(IDLE) == sum(map(len, tables))
    assert NXDT.defaults.keys() | NXDT.overridden_by.keys() <= NXDT.keys


@pytest.mark.skipif(not MAP.is_file(), reason="needs ../shared/spec/dialect_map.yaml")
def test_every_key_that_is_documented_is_known() -> None:
    rows = [row for row in yaml.safe_load(MAP.read_text()) if row["dialect"] == "nxdt"]
    assert len(rows) > 150
    assert {row["key"] for row in rows} <= NXDT.keys


@pytest.mark.skipif(not EXAMPLES, reason="needs ../shared/examples")
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_published_files_are_runs(file: Path, ranks: int) -> None:
    translation = load_translation(file, None, Devices(ranks, has_gpus=False))
    assert translation.dialect == "nxdt"
    assert not translation.of(*GAPS)
    # Their models lie on other machines: one that is here stands in.
    settings = deepcopy(dict(translation.settings))
    settings["model"]["config_path"] = "builtin:tiny-llama"
    settings["model"]["foundation"] = {}
    settings["train"].update(tensor_parallel_size=1, pipeline_parallel_size=1)
    settings["train"].pop("sequence_parallel", None)
    settings["launch"] = {}
    check_machine(loads(settings))


def test_a_fine_tuning_run_has_the_settings_of_its_file() -> None:
    run = run_of({})
    assert run.pipeline.name == "llama3_sft"
    assert run.train.init_checkpoint_path == "models/Meta-Llama-3-8B"
    assert not run.data.isolate_samples
    assert run.model.foundation["max_position_embeddings"] == 8192
    source = run.data.datasets[0]
    assert (source.path, source.type) == ("data/training.jsonl", "instruction")
    assert (source.field_instruction, source.field_output) == ("input", "output")
    assert run.data.sample_packing_sequence_len == source.max_seq_len == 8192
    assert run.train.output_dir == "runs/llama3_sft"
    assert run.train.optimizer_kwargs == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert run.train.no_decay_params == ["bias", "norm"]
    assert (run.train.eval_steps, run.train.eval_max_batches) == (200, 10)
    assert (run.train.save_steps, run.train.save_epochs) == (200, 0)
    assert run.train.recompute_modules == ["core_attn", "mlp"]
    assert (run.train.precision, run.train.zero_stage) == ("bf16_mixed", 1)
    assert run.train.tensor_parallel_size == 8


def test_preferences_are_learnt_with_the_documented_defaults() -> None:
    dpo = run_of({SFT: None, f"{DPO}.loss_type": "sigmoid"})
    assert (dpo.train.objective, dpo.preference.beta) == ("preference", 0.01)
    assert dpo.data.max_prompt_len == 2048
    assert dpo.data.sample_packing_sequence_len == 2 * 8192
    assert dpo.data.sample_packing_group_size == 1
    orpo = run_of({SFT: None, f"{ORPO}.beta": 0.2})
    assert (orpo.preference.loss_type, orpo.preference.pref_loss_ratio) == ("orpo", 0.2)
    assert orpo.preference.sft_weight == 1


def test_adapters_go_on_the_parts_of_fused_layers() -> None:
    lora = run_of({f"{PEFT}.lora_rank": 8}).lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout) == (8, 32, 0.05)
    assert lora.lora_target_modules == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize(
    ("keys", "precision", "rounds", "adds_up_in", "optimizer"),
    [
        ({"precision.type": "fp32"}, "fp32", False, None, "adamw"),
        ({"precision.type": "autocast"}, "bf16_mixed", False, "fp32", "adamw"),
        ({"precision.type": "mixed_precision_SR"}, "bf16_mixed", False, "fp32", "adamw"),
        (
            {"precision.type": "bf16SR", "model.optim.name": "adamw"},
            *("bf16", True, "bf16", "anyprecision_adamw"),
        ),
        ({"precision.type": "bf16SR"}, "bf16", True, "bf16", "adamw"),
        (
            {
                "precision.type": "manual",
                "precision.xla_downcast_bf16": "1",
                "precision.master_weights": True,
                "precision.fp32_grad_acc": True,
            },
            *("bf16_mixed", False, "fp32", "adamw"),
        ),
        ({"precision.type": "manual"}, "fp32", False, None, "adamw"),
    ],
)
def test_precision_is_what_its_word_means(
    keys: dict[str, Any], precision: str, rounds: bool, adds_up_in: str | None, optimizer: str
) -> None:
    train = run_of(keys).train
    found = (train.precision, train.stochastic_rounding, train.grad_accum_dtype, train.optimizer)
    assert found == (precision, rounds, adds_up_in, optimizer)


@pytest.mark.skipif(not VECTORS.is_file(), reason="needs ../shared/spec/lr_vectors.json")
def test_rates_are_those_that_nemo_computes() -> None:
    cases = json.loads(VECTORS.read_text())["nemo"]
    assert len(cases) > 10
    for case in cases:
        given = {f"{SCHEDULE}.{name}": value for name, value in case["args"].items()}
        keys = {
            **{f"{SCHEDULE}.warmup_steps": None, f"{SCHEDULE}.min_lr": None},
            **{**given, f"{SCHEDULE}.name": case["name"], "model.optim.lr": case["lr"]},
            "trainer.max_steps": 100,
        }
        train = run_of(keys).train
        for step, rate in case["lr_at"].items():
            if int(step) < 100:
                assert lr_at(int(step), 100, train) == pytest.approx(rate, rel=1e-9), case["name"]


def test_a_model_of_numbers_is_a_llama_that_can_be_built() -> None:
    run = run_of({**MEGATRON, "model.hidden_size": 64, "model.num_attention_heads": 4})
    assert run.model.config_path == "builtin:tiny-llama"
    assert run.model.foundation["hidden_size"] == 64
    assert run.model.foundation["vocab_size"] % (128 * 8) == 0
    assert run.train.dropout.hidden == 0.1


def test_experts_make_a_mixtral_of_a_model_of_numbers() -> None:
    experts = {"model.moe.num_experts": 4, "model.moe.top_k": 2}
    sizes = {"model.hidden_size": 64, "model.num_attention_heads": 4, "model.num_kv_heads": 2}
    config = resolve_hf_config(run_of({**MEGATRON, **experts, **sizes, "model.kv_channels": 16}))
    decoder = get_family(config).read(config)
    assert decoder.experts
    assert (decoder.experts.num_experts, decoder.experts.experts_per_token) == (4, 2)
    assert (decoder.hidden_size, decoder.num_hidden_layers) == (64, 32)
    sinkhorn = {**experts, "model.moe.routing_algorithm": "sinkhorn"}
    key = "model.moe.routing_algorithm"
    assert line_of(translated({**MEGATRON, **sinkhorn}), key).kind == "approximated"
    assert line_of(translated(sinkhorn), key).kind in GAPS


def test_a_schedule_that_is_not_here_is_refused() -> None:
    line = line_of(translated({f"{SCHEDULE}.name": "CosineAnealing"}), f"{SCHEDULE}.name")
    assert line.kind in GAPS


@pytest.mark.parametrize("name", ["StepLR", "ExponentialLR"])
def test_pytorchs_schedules_are_number_for_number(name: str) -> None:
    own = {"gamma": 0.7, **({"step_size": 3} if name == "StepLR" else {})}
    keys = {f"{SCHEDULE}.{key}": value for key, value in own.items()}
    train = run_of({f"{SCHEDULE}.name": name, **keys}).train
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.lr)
    theirs = getattr(torch.optim.lr_scheduler, name)(optimizer, **own)
    for step in range(20):
        assert lr_at(step, 50, train) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=0)
        optimizer.step()
        theirs.step()


def test_novograd_is_nemos_with_its_defaults_and_states_as_weights_are_kept() -> None:
    name = {"model.optim.name": "novograd"}
    train = run_of({**name, "model.optim.betas": None}).train
    assert (train.optimizer, train.optimizer_dtype) == ("novograd", "fp32")
    assert train.optimizer_kwargs == {"betas": [0.95, 0.98], "eps": 1e-8}
    told = {"betas": [0.8, 0.9], "eps": 1e-4, "grad_averaging": True, "amsgrad": True}
    keys = {f"model.optim.{key}": value for key, value in told.items()}
    train = run_of({**name, **keys, "precision.type": "bf16SR"}).train
    assert train.optimizer_kwargs == told
    assert (train.optimizer_dtype, train.stochastic_rounding) == ("bf16", True)
    for key, optimizer in (("luc", "novograd"), ("amsgrad", "adamw")):
        said = translated({"model.optim.name": optimizer, f"model.optim.{key}": True})
        assert line_of(said, f"model.optim.{key}").kind in GAPS


SMALL = {
    "model.hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 4,
    "exp_manager.resume_from_checkpoint": None,
}
ROPE, LAYER = {"model.position_embedding_type": "rope"}, {"model.normalization": "layernorm"}
GELU, SHARED = {"model.activation": "gelu"}, {"model.rotary_percentage": 0.5}
BIASED = {"model.has_bias": True}


@pytest.mark.parametrize(
    ("keys", "model_type", "parts"),
    [
        ({}, "llama", ("rms", True, 16, False)),
        (BIASED, "llama", ("rms", True, 16, True)),
        (SHARED, "glm4_moe", ("rms", True, 8, False)),
        (GELU, "arcee", ("rms", False, 16, False)),
        ({**GELU, **BIASED}, "arcee", ("rms", False, 16, True)),
        ({**LAYER, **GELU}, "jais2", ("layer", False, 16, False)),
        ({**LAYER, **GELU, **BIASED}, "jais2", ("layer", False, 16, True)),
        ({**LAYER, **GELU, **SHARED, **BIASED}, "nemotron", ("layer_1p", False, 8, True)),
        (LAYER, "stablelm", ("layer", True, 16, False)),
        ({**LAYER, **SHARED}, "stablelm", ("layer", True, 8, False)),
    ],
)
def test_a_model_of_numbers_is_the_architecture_that_has_its_parts(
    keys: dict[str, Any], model_type: str, parts: tuple[Any, ...]
) -> None:
    eps = {"model.layernorm_epsilon": 0.25}
    run = run_of({**MEGATRON, **SMALL, **ROPE, **eps, **keys})
    config = resolve_hf_config(run)
    decoder = get_family(config).read(config)
    assert config["model_type"] == model_type
    found = (decoder.norm, decoder.gated, decoder.rotary_dim, decoder.o_bias and decoder.mlp_bias)
    assert found == parts
    assert decoder.activation == ("gelu" if "model.activation" in keys else "silu")
    assert (decoder.rms_norm_eps, decoder.head_dim, decoder.experts) == (0.25, 16, None)
    # Nothing of it is without effect, and transformers takes the same for such a model.
    check_foundation_entries(run)
    theirs = transformers.AutoConfig.for_model(**config)
    assert type(theirs).__name__.removesuffix("Config") in config["architectures"][0]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({**LAYER, **BIASED}, "layernorm, rotary embedding, swiglu, biases"),
        ({**GELU, **SHARED}, "rmsnorm, rotary embedding over a share of each head, gelu"),
        ({**LAYER, "model.moe.num_experts": 4}, "layernorm, rotary embedding, swiglu, experts"),
    ],
)
def test_parts_that_no_architecture_has_together_are_refused(
    keys: dict[str, Any], says: str
) -> None:
    refused = translated({**MEGATRON, **SMALL, **ROPE, **keys}).of(*GAPS)
    assert [line for line in refused if says in line.why]


LEARNED = {
    **MEGATRON,
    **SMALL,
    "model.position_embedding_type": "learned_absolute",
    **LAYER,
    **GELU,
}
NORMAL = {"model.layernorm_epsilon": 1e-5}


@pytest.mark.parametrize("biased", [True, False])
def test_learned_positions_make_an_opt_of_a_model_of_numbers(biased: bool) -> None:
    sizes = {"model.num_layers": 2, "model.ffn_hidden_size": 96, "model.init_method_std": 0.25}
    keys = {**sizes, "model.has_bias": biased}
    run = run_of({**LEARNED, **NORMAL, **keys, "model.max_position_embeddings": 8192})
    config = resolve_hf_config(run)
    decoder = get_family(config).read(config)
    assert config["model_type"] == "opt"
    assert decoder.learned_positions == LearnedPositions(8192 + 2, 2)
    found = (decoder.norm, decoder.rms_norm_eps, decoder.gated, decoder.activation)
    assert found == ("layer", 1e-5, False, "gelu")
    assert (decoder.qkv_bias, decoder.o_bias, decoder.mlp_bias) == (biased,) * 3
    assert (decoder.intermediate_size, decoder.initializer_range) == (96, 0.25)
    check_foundation_entries(run)
    theirs = transformers.AutoConfig.for_model(**config)
    assert (theirs.ffn_dim, theirs.enable_bias, theirs.dropout) == (96, biased, 0.0)
    assert (theirs.activation_function, theirs.do_layer_norm_before) == ("gelu", True)
    pair = ours_with(transformers.AutoModelForCausalLM.from_config(theirs).eval(), merge_qkv=False)
    ids = [torch.arange(3, 20), torch.arange(40, 47)]
    with torch.no_grad():
        wanted = torch.cat([their_logits(pair.theirs, document) for document in ids])
        torch.testing.assert_close(packed_logits(pair.ours, ids), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"model.normalization": "rmsnorm"}, "position_embedding_type", "rmsnorm, learned"),
        ({"model.activation": "swiglu"}, "position_embedding_type", "swiglu"),
        ({"model.moe.num_experts": 4}, "position_embedding_type", "experts"),
        ({"model.num_kv_heads": 2}, "num_kv_heads", "write 4"),
        ({"model.kv_channels": 8}, "kv_channels", "leave it out"),
        ({"model.layernorm_epsilon": 1e-6}, "layernorm_epsilon", "write 1e-05"),
    ],
)
def test_learned_positions_are_refused_where_no_architecture_has_the_rest(
    keys: dict[str, Any], key: str, says: str
) -> None:
    line = line_of(translated({**LEARNED, **NORMAL, **keys}), f"model.{key}")
    assert line.kind in GAPS
    assert says in line.why
    assert "position_embedding_type: rope" in line.why


def test_the_file_of_a_models_config_is_said_by_its_folder():
    found = translate(changed({"model.model_config": "/models/llama/config.json"}), NXDT, GPUS)
    assert found.settings["model"]["config_path"] == "/models/llama"


def indexed(prefix: Any, **keys: Any) -> Translation:
    """A file with Megatron's data module."""
    values = changed({**MAPPED, "data.data_prefix": prefix})
    for key, value in keys.items():
        values["data"][key] = value
    return translate(values, NXDT, GPUS)


def sources_of(translation: Translation, name: str) -> list[tuple[Any, ...]]:
    names = ("path", "weight", "splits_string", "split")
    found = value_at(translation.settings, f"data.{name}", [])
    assert all(source["ds_type"] == "megatron" for source in found)
    return [tuple(source.get(name) for name in names) for source in found]


SHARED_OUT = "900,100,0"


@pytest.mark.parametrize(
    ("prefix", "train", "held"),
    [
        ("a", [("a", None, SHARED_OUT, None)], [("a", None, SHARED_OUT, "validation")]),
        ([1.0, "a"], [("a", None, SHARED_OUT, None)], [("a", None, SHARED_OUT, "validation")]),
        (
            [0.3, "a", 0.7, "b"],
            [("a", 0.3, SHARED_OUT, None), ("b", 0.7, SHARED_OUT, None)],
            [("a", None, SHARED_OUT, "validation"), ("b", None, SHARED_OUT, "validation")],
        ),
        (
            ["a", "b"],
            [("a", None, SHARED_OUT, None), ("b", None, SHARED_OUT, None)],
            [("a", None, SHARED_OUT, "validation"), ("b", None, SHARED_OUT, "validation")],
        ),
        (
            {"train": [0.5, "a", 0.5, "b"], "validation": ["c"], "test": "d"},
            [("a", 0.5, None, None), ("b", 0.5, None, None)],
            [("c", None, None, None)],
        ),
    ],
)
def test_a_data_prefix_is_megatrons_documents_with_their_splits_and_weights(
    prefix: Any, train: list[tuple[Any, ...]], held: list[tuple[Any, ...]]
) -> None:
    found = indexed(prefix, splits_string=SHARED_OUT)
    assert sources_of(found, "datasets") == train
    assert sources_of(found, "test_datasets") == held
    data = loads(found.settings).data
    assert (data.sample_packing_method, data.isolate_samples) == ("wrapped", False)
    assert data.shuffle_merged_datasets
    is_weighed = any(source[1] for source in train)
    assert (data.mix_strategy, data.weight_unit) == (
        ("random", "tokens") if is_weighed else ("concat", "samples")
    )
    line = line_of(found, "data.data_prefix")
    loses_weights = len(held) > 1 and is_weighed
    assert line.kind == ("approximated" if loses_weights else "translated")
    assert ("in shares of 0.3, 0.7" in line.why) == loses_weights


@pytest.mark.parametrize(
    ("validation", "held", "shares"),
    [
        ([0.25, "c", 0.75, "d"], ["c", "d"], "0.25, 0.75"),
        ([0, "c", 2, "d", 1, "e"], ["d", "e"], "0, 2, 1"),
        (["c", "d"], ["c", "d"], None),
        ([0.5, "c"], ["c"], None),
        ("c", ["c"], None),
    ],
)
def test_weights_of_validation_prefixes_are_reported_as_read_whole(
    validation: Any, held: list[str], shares: str | None
) -> None:
    found = indexed({"train": "a", "validation": validation})
    assert [source[:2] for source in sources_of(found, "test_datasets")] == [
        (path, None) for path in held
    ]
    line = line_of(found, "data.data_prefix")
    assert line.kind == ("approximated" if shares else "translated")
    assert (f"validation reads every prefix whole, and not in shares of {shares};" in line.why) == (
        shares is not None
    )


def test_a_data_prefix_is_split_as_there_unless_it_says_otherwise() -> None:
    found = indexed("a")
    assert sources_of(found, "datasets")[0][2] == "980,10,10"
    assert line_of(found, "data.splits_string").kind == "assumed"
    alone = indexed("a", splits_string="100,0,0")
    assert sources_of(alone, "test_datasets") == []
    apart = loads(indexed("a", reset_attention_mask=True).settings).data
    assert apart.isolate_samples
    for wrong in ([0.3, "a", "b"], [0.3, "a", 0.7]):
        assert line_of(indexed(wrong), "data.data_prefix").kind in GAPS
    assert line_of(indexed("a", splits_string="x"), "data.splits_string").kind in GAPS


@pytest.mark.parametrize(
    ("masters", "kind", "rounds"), [(True, "approximated", False), (False, "maps", True)]
)
def test_rounding_at_random_by_hand_is_used_or_reported(
    masters: bool, kind: str, rounds: bool
) -> None:
    found = translated(
        {
            "precision.type": "manual",
            "precision.xla_downcast_bf16": "1",
            "precision.master_weights": masters,
            "precision.neuron_rt_stochastic_rounding_en": "1",
        }
    )
    line = line_of(found, "precision.neuron_rt_stochastic_rounding_en")
    assert (line.kind in (kind, "translated"), bool(line.why)) == (True, masters)
    assert loads(found.settings).train.stochastic_rounding == rounds
