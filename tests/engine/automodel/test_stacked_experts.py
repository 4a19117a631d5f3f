"""Adapters of stacked experts: PEFT computes the same with them, and so does the merged model."""

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.afmoe.modeling_afmoe import AfmoeExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.lora_stacked import StackedAdapter
from penstock.adapters.match_targets import stacked_layer
from penstock.adapters.names import parse_lora_name
from penstock.adapters.validate_options import require_options
from penstock.core.errors import ConfigError
from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, LoraArgs, ModelSource
from penstock.models.automodel.build import build_config, build_model
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.outline import STACKED, AutoModelConfig
from penstock.models.layers.dropout import DropoutRNG, RowDropout, dropout_rng
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import CHECKPOINTS, Job
from tests.engine import loops
from tests.engine.automodel import examine, tiny_models
from tests.engine.traces import loss_of_transformers
from tests.models.twins import (
    assert_gradients_equal,
    documents,
    gradients,
    packed_logits,
    packed_loss,
    twins,
)
from tests.ranks import on_ranks
from tests.turns import one_day_in

ADAPTERS, RATE = {"lora_alpha": 32}, 0.3


def _job(folder: Path, out: str = "adapted", **train: Any) -> Job:
    return examine.job_of(folder, out, adapters={"lora_alpha": 32}, max_steps=4, **train)


def _trained(folder: Path) -> tuple[list[float], bool, float]:
    """The losses of three steps, whether a resumed run has the same weights, and the loss after."""
    found = examine.trained(_job(folder))
    again = loops.loop_of(_job(folder))
    again._resume()
    losses, _, resumes = found or ([], {}, True)
    return losses, resumes, loops.step(again)["loss"]


def _continued(folder: Path, adapter: Path) -> float:
    """The first loss of a run that starts at the adapter."""
    job = _job(folder, "again", data_parallel_shard_size=1)
    return loops.step(loops.loop_of(replace(job, adapter=adapter)))["loss"]


def _exported(folder: Path) -> Path:
    job, path = _job(folder), str(folder)
    origin = ModelSource(
        config=pin_model(path),
        config_path=path,
        weights=pin_model(path),
        model_path=path,
        tokenizer=pin_tokenizer("builtin:bytes"),
        tokenizer_path="builtin:bytes",
        backend="transformers",
        adapting=LoraArgs(job.config.lora.lora_alpha, "rank", 0, "none"),
    )
    out = job.output_dir / "export"
    checkpoint = job.output_dir / CHECKPOINTS / f"global_step_{examine.STEPS}"
    write_folders(checkpoint, origin, ExportFormat(), out)
    return out


@torch.no_grad()
def _logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(8, 40)[None], use_cache=False).logits


# With a dense layer and shared experts; transposed; padded batches.
@one_day_in(3, of=1)
@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",
        pytest.param("gpt_oss", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", marks=pytest.mark.exhaustive),
    ],
)
def test_an_adapter_of_experts_is_the_same_in_peft_and_merged(tmp_path, model_type):
    folder = tmp_path / "model"
    examine.write_rows(tmp_path)
    tiny_models.write_model(folder, model_type, noise=0.1)
    (losses, resumes, loss), _ = on_ranks(2, _trained, folder)
    assert losses[-1] < losses[0]
    assert resumes
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = _exported(folder)
    adapted = peft.PeftModel.from_pretrained(base, out / "adapter")
    stacked = [n for n, _ in adapted.named_parameters() if ".experts." in n and "lora_B" in n]
    assert stacked
    assert all(adapted.get_parameter(name).abs().max() > 0 for name in stacked)
    rows = PackedRows(tmp_path / "packed" / "data" / "train")
    with torch.no_grad():
        of_peft = loss_of_transformers(adapted.eval(), rows, [0, 1, 2, 3]).item()
    assert of_peft == pytest.approx(loss, rel=1e-5)
    assert on_ranks(1, _continued, folder, out / "adapter") == [pytest.approx(loss, rel=1e-5)]
    wanted = _logits(adapted)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    assert (_logits(merged) - wanted).norm() <= 1e-5 * wanted.norm()


def _adapted(values: dict[str, Any], weights: dict[str, torch.Tensor], rate: float) -> AutoCausalLM:
    """A model of the transformers backend with adapters that change what it computes."""
    family = auto_family(values)
    config = family.read(values)
    assert isinstance(config, AutoModelConfig)
    model = AutoCausalLM(values, config)
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    targets = [name for name in family.lora_targets if name != "lm_head"]
    inject(model, LoraSpec(4, 8.0, targets, 11, rate))
    _fill_adapters(model)
    return model


@torch.no_grad()
def _fill_adapters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Fill the adapters' B, the same in models with the same names; returns the adapters."""
    adapters = {name: p for name, p in model.named_parameters() if parse_lora_name(name)}
    for name, parameter in sorted(adapters.items()):
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapters


def _dropping(tokens: torch.Tensor) -> AbstractContextManager[None]:
    return dropout_rng(DropoutRNG(seed=1, step=2, token_indices_T=tokens))


@pytest.mark.slow
def test_inputs_of_stacked_experts_are_dropped_as_those_of_native_ones():
    pair = twins("gpt_oss")
    values = {**pair.theirs.config.to_dict(), "model_type": "gpt_oss"}
    ours = _adapted(values, pair.theirs.state_dict(), RATE)
    targets = ["gate_up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    inject(pair.ours, LoraSpec(4, 8.0, targets, 11, RATE))
    native = _fill_adapters(pair.ours)
    assert native.keys() == {name for name, p in ours.named_parameters() if p.requires_grad}
    ids, labels = documents([9, 6])
    logits = []
    for model in (ours, pair.ours):
        plain = packed_logits(model.eval(), ids).detach()
        with _dropping(torch.arange(15)):
            logits.append(packed_logits(model.train(), ids))
            packed_loss(model, ids, labels).backward()
        assert (logits[-1] - plain).abs().max() > 0.01
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5)
    assert_gradients_equal(gradients(ours), gradients(pair.ours))


@pytest.mark.parametrize(
    ("experts_class", "config"),
    [
        (AfmoeExperts, {"num_experts": 8}),
        (MuseSparkExperts, {"num_local_experts": 8, "moe_hidden_size": 16, "post_norm_eps": 1e-5}),
        (NemotronHExperts, {"n_routed_experts": 8, "mlp_hidden_act": "relu2"}),
    ],
)
def test_experts_with_dropout_compute_as_without_it_when_they_are_evaluated(experts_class, config):
    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "hidden_act": "silu"}
    attributes = {**sizes, "moe_latent_size": None, **config}
    torch.manual_seed(0)
    plain = experts_class(SimpleNamespace(**attributes, _experts_implementation="eager"))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dropping = copy.deepcopy(plain)
    for experts, dropout in ((plain, None), (dropping, RowDropout(RATE, "experts"))):
        matrices: list[Any] = [name for name in STACKED if name in experts._parameters]
        StackedAdapter(experts, matrices, rank=4, scale=2.0, dropout=dropout)
    with torch.no_grad():
        for of_plain, of_dropping in zip(
            plain.adapter.parameters(), dropping.adapter.parameters(), strict=True
        ):
            of_dropping.copy_(of_plain.normal_(std=0.3))
    choices = torch.randn(12, 8).topk(2).indices
    inputs = torch.randn(12, 16), choices, torch.rand(12, 2)
    with _dropping(torch.arange(12)):
        torch.testing.assert_close(dropping.eval()(*inputs), plain(*inputs))
        assert not torch.equal(dropping.train()(*inputs), plain(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next"])
def test_documents_of_a_padded_batch_are_dropped_as_alone(model_type):
    values = {**tiny_models.tiny_config(model_type).to_dict(), "model_type": model_type}
    weights = build_model(build_config(values), "eager").state_dict()
    model = _adapted(values, weights, RATE)
    ids, _ = documents([9, 6])
    tokens = torch.tensor([*range(9), *range(40, 46)])
    with torch.no_grad():
        with _dropping(tokens):
            together = packed_logits(model, ids)
        alone = []
        for document, indices in zip(ids, tokens.split([9, 6]), strict=True):
            with _dropping(indices):
                alone.append(packed_logits(model, [document]))
    assert (together - packed_logits(model.eval(), ids)).abs().max() > 1e-3
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-5)


def _dropped(folder: Path) -> dict[str, tuple[float, float]]:
    """Two losses in layouts that compute other micro-batches, or some of it twice."""
    losses = {}
    for layout, settings in {
        "sharded": {},
        "two rows at once": {"micro_batch_size": 2},
        "replicated": {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2},
        "kept": {"enable_gradient_checkpointing": False},
    }.items():
        adapters = {**ADAPTERS, "lora_dropout": RATE}
        loop = loops.loop_of(examine.job_of(folder, layout, adapters=adapters, **settings))
        losses[layout] = loops.step(loop)["loss"], loops.step(loop)["loss"]
    return losses


@one_day_in(3, of=2)
def test_dropout_of_adapters_is_the_same_in_any_layout(tmp_path):
    examine.write_rows(tmp_path)
    tiny_models.write_model(tmp_path / "model", "jamba", noise=0.1)
    losses, _ = on_ranks(2, _dropped, tmp_path / "model")
    for layout, pair in losses.items():
        assert pair == pytest.approx(losses["sharded"], rel=1e-5), layout


@pytest.mark.slow
def test_dropout_of_experts_whose_code_cannot_be_replaced_is_refused():
    values = tiny_models.tiny_config("llama4_text").to_dict()
    family = auto_family(values)
    names = family.weight_map(family.read(values))
    stacked = [stacked_layer(native) for native in family.outline.stacked]
    require = partial(require_options, normed="plain", experts="each", bias="none")
    require(stacked, names, dropout=0.0)
    with pytest.raises(
        ConfigError, match=r"lora_dropout is 0.1.*experts of Llama4ForCausalLM"
    ) as e:
        require(stacked, names, dropout=0.1)
    assert "Write lora_dropout: 0, or lora_target_modules without experts" in str(e.value)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss"])
def test_biases_of_adapted_layers_are_trained_and_not_those_of_norms(model_type):
    values = {**tiny_models.tiny_config(model_type).to_dict(), "model_type": model_type}
    family = auto_family(values)
    config = family.read(values)
    assert isinstance(config, AutoModelConfig)
    model = AutoCausalLM(values, config)
    spec = LoraSpec(4, 8, family.lora_targets, bias="lora_only")
    with torch.device("meta"):
        chosen = inject(model, spec)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    biases = {name for name in learning if name.endswith(".bias")}
    assert biases
    assert {name.removesuffix(".bias") for name in biases} <= set(chosen)
