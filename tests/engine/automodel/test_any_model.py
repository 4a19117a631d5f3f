"""Models that are trained through transformers' own code: what must hold of every one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.core.errors import CapabilityError
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from penstock.engine.validate_backend import UNSUPPORTED, describe_backend, require_backend
from penstock.models.automodel.family import AutoFamily, auto_family
from penstock.models.automodel.proved import AUDIO_FILE, FILE, IMAGE_FILE, ProvedModels
from penstock.models.registry import get_family
from penstock.rows.reader import PackedRows
from tests.engine import loops, runs
from tests.engine.automodel import examine, page, tiny_models
from tests.engine.inputs import MODELS, SHAPE
from tests.engine.traces import loss_of_transformers
from tests.models.families import FAMILIES
from tests.models.twins import SIZES
from tests.ranks import on_ranks
from tests.turns import one_day_in, over_days, taking_turns

KINDS = (
    "apertus",  # scalar parameters
    "bloom",  # ALiBi: masks of its own, one document a row
    "codegen",  # queries, keys and values in one matrix, in blocks; parallel blocks
    "deepseek_v3",  # latent attention, experts stored one by one, a router's buffer
    "falcon",  # one key head; a parallel block
    "gemma3n_text",  # per-layer inputs, shared keys and values, soft-capped logits
    "falcon_h1",  # state and attention side by side
    "gpt2",  # learned positions, transposed matrices
    "llama4_text",  # chunked attention, all logits
    "mamba",  # state
    "modernbert-decoder",  # a head of several layers
    "qwen3_next",  # linear attention and gated attention
    "gpt_neox",  # partial rotation of queries and keys in one matrix
)
"""Model types of different kinds; all others are examined by an exhaustive test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    examine.write_rows(root)
    return root


def _examined(folder: Path, model_type: str) -> list[str]:
    return examine.examine(folder / model_type, model_type).faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", taking_turns([kind for kind in KINDS if kind != "gemma3n_text"], 2)
)
def test_a_model_trains_resumes_and_is_exported(folder, model_type):
    assert _examined(folder, model_type) == []


@pytest.mark.parametrize("kind", over_days(("olmoe", "dense mamba"), 2))
def test_a_config_of_few_sizes_is_called_as_it_is(kind):
    assert isinstance(auto_family({**runs.TINY, **SHAPE, **MODELS[kind]}), AutoFamily)


def test_a_config_of_few_sizes_that_transformers_cannot_run_is_refused_with_the_reason():
    with pytest.raises(CapabilityError, match="cannot run a small model of type"):
        auto_family({**runs.TINY, **SHAPE, **MODELS["latent attention"]})


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_every_model_type_of_transformers_trains_or_has_its_reason(folder, model_type):
    reason = ProvedModels.read().models[model_type].reason
    if model_type in tiny_models.NOT_BUILT:
        assert reason
        return
    try:
        faults = _examined(folder, model_type)
    except Exception as error:  # noqa: BLE001 - any error is a reason
        faults = [str(error)]
    assert bool(faults) == bool(reason), faults


def test_what_was_proved_is_of_every_type_that_the_library_lists():
    proved = ProvedModels.read()
    if proved.transformers != transformers.__version__:
        pytest.skip(f"proved with transformers {proved.transformers}")
    assert sorted(proved.models) == tiny_models.MODEL_TYPES
    assert sum(not one.reason for one in proved.models.values()) >= 150
    assert all(one.packing for name, one in proved.models.items() if name in ("gemma2", "phi3"))


def test_the_page_of_model_types_is_fresh():
    assert page.PAGE.read_text() == page.page(
        *map(ProvedModels.read, (FILE, IMAGE_FILE, AUDIO_FILE))
    )


LAYOUTS = {
    "shard 2": {},
    "two rows at once": {"micro_batch_size": 2},
    "replicate 2": {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2},
    "ddp": {
        "data_parallel_mode": "ddp",
        "data_parallel_shard_size": 1,
        "data_parallel_replicate_size": 2,
    },
    "nothing recomputed": {"enable_gradient_checkpointing": False},
    "each reads": {"load_weights_mode": "all_ranks"},
    "on the host": {"enable_fsdp_offload": True},
}


def _layouts(folder: Path) -> dict[str, tuple[float, float, loops.Arrays]]:
    found = {}
    for name, changes in LAYOUTS.items():
        loop = loops.loop_of(examine.job_of(folder, name, max_grad_norm=0.5, **changes))
        records = [loops.step(loop) for _ in range(2)]
        found[name] = (records[1]["loss"], records[0]["grad_norm"], loops.parameters_of(loop))
    return found


@one_day_in(3, of=0)
@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", pytest.param("mamba", marks=pytest.mark.exhaustive)]
)
def test_any_layout_gives_the_same_loss_norm_and_weights(folder, model_type):
    own = folder / f"laid-{model_type}"
    tiny_models.write_described(own, model_type)
    found, _ = on_ranks(2, _layouts, own)
    loss, norm, weights = found.pop("shard 2")
    for name, (other_loss, other_norm, others) in found.items():
        assert other_loss == pytest.approx(loss, rel=1e-5), name
        assert other_norm == pytest.approx(norm, rel=1e-5), name
        for tensor, value in weights.items():
            # Adam divides by the root of a gradient's square, however small it is.
            error = np.abs(others[tensor] - value).max()
            assert error <= 2e-4, f"{name}: {tensor} by {error}"


def _with_dropout(folder: Path) -> dict[str, tuple[list[float], loops.Arrays, bool] | None]:
    forms = {"recomputed": True, "kept": False}
    jobs = {
        name: examine.job_of(folder, name, enable_gradient_checkpointing=recomputes)
        for name, recomputes in forms.items()
    }
    return {name: examine.trained(job) for name, job in jobs.items()}


@one_day_in(3, of=1)
def test_dropout_of_the_model_is_the_same_when_recomputed_and_resumed(folder):
    own = folder / "dropout"
    tiny_models.write_described(own, "gpt2", resid_pdrop=0.3, embd_pdrop=0.1, attn_pdrop=0.1)
    found = on_ranks(2, _with_dropout, own)[0]
    (losses, weights, resumes), (kept_losses, kept, kept_resumes) = found.values()
    assert resumes
    assert kept_resumes
    assert losses == pytest.approx(kept_losses, rel=1e-5)
    for name, value in kept.items():
        np.testing.assert_allclose(weights[name], value, atol=2e-4, err_msg=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
    rows = PackedRows(folder / "packed" / "data" / "train")
    without = loss_of_transformers(model, rows, [0, 1, 2, 3]).item()
    assert abs(losses[0] - without) > 1e-3 * without


def _continued(folder: Path) -> float:
    """The loss of the weights that the export has."""
    more = {"max_steps": 4, "num_train_epochs": 4, "data_parallel_mode": "none"}
    job = examine.job_of(folder, "out", **more, data_parallel_shard_size=1)
    examine.trained(job)
    loop = loops.loop_of(job)
    loop._resume()
    return loops.step(loop)["loss"]


@one_day_in(3, of=2)
def test_an_export_of_dbrx_has_the_rope_theta_of_its_attention_where_transformers_reads_it(folder):
    own = folder / "dbrx-as-released"
    tiny_models.write_model(own, "dbrx", noise=0.1)
    file = own / "config.json"
    released = json.loads(file.read_text())
    del released["rope_parameters"]
    file.write_text(json.dumps(released))
    [loss] = on_ranks(1, _continued, own)
    exported = examine.export(own, examine.job_of(own, "out"), examine.STEPS)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    assert model.config.rope_parameters["rope_theta"] == released["attn_config"]["rope_theta"]
    rows = PackedRows(folder / "packed" / "data" / "train")
    with torch.no_grad():
        of_export = loss_of_transformers(model, rows, [0, 1, 2, 3]).item()
    assert of_export == pytest.approx(loss, rel=1e-5)


def _gradients(folder: Path) -> tuple[float, loops.Arrays] | None:
    loop = loops.loop_of(examine.job_of(folder, "gradients", max_grad_norm=0.0))
    found = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    loss = loops.step(loop)["loss"]
    return (loss, found[0]) if loop.ranks.is_main_process else None


@pytest.mark.parametrize("model_type", over_days(("gemma2", "granite", "qwen2_moe"), 3))
def test_gradients_are_those_of_transformers_on_separate_documents(folder, model_type):
    own = folder / f"gradients-{model_type}"
    tiny_models.write_described(own, model_type)
    loss, gradients = next(one for one in on_ranks(2, _gradients, own) if one)
    model = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).train()
    expected = loss_of_transformers(
        model, PackedRows(folder / "packed" / "data" / "train"), [0, 1, 2, 3]
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted = parameter.grad.numpy()
        error = np.linalg.norm(gradients[name] - wanted) / np.linalg.norm(wanted)
        assert error <= 2e-5, f"{name}: {error}"


def _with_nf4(folder: Path) -> tuple[list[float], int]:
    job = examine.job_of(
        folder,
        "nf4",
        adapters={"enable_qlora": True, "quant_format": "nf4", "lora_alpha": 32},
    )
    loop = loops.loop_of(job)
    losses = [loops.step(loop)["loss"] for _ in range(3)]
    quantized = [name for name in loops.parameters_of(loop) if name.endswith(".codes")]
    return losses, len(quantized)


@pytest.mark.slow
def test_a_quantized_base_trains_with_adapters(folder):
    own = folder / "nf4"
    tiny_models.write_described(own, "gemma2")
    (losses, quantized), _ = on_ranks(2, _with_nf4, own)
    assert losses[-1] < losses[0]
    assert quantized == 2 * 7


def _sampled(folder: Path) -> list[list[int]]:
    loop = loops.loop_of(examine.job_of(folder, "sampled"))
    greedy = SamplingParams(max_tokens=6, temperature=0)
    prompts = [Prompt(tuple(range(9, 9 + length)), greedy) for length in (3, 5)]
    return [list(out.completions[0].tokens) for out in loop.built.generator.generate(prompts)]


@pytest.mark.parametrize("model_type", over_days(("gemma2", "mamba"), 2))
def test_greedy_samples_are_those_of_transformers(folder, model_type):
    own = folder / f"sampled-{model_type}"
    tiny_models.write_described(own, model_type, noise=0.2)
    found, _ = on_ranks(2, _sampled, own)
    model = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
    for length, tokens in zip((3, 5), found, strict=True):
        ids = torch.arange(9, 9 + length)[None]
        for token in tokens:
            assert token == int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
            ids = torch.cat((ids, torch.tensor([[token]])), dim=1)


@pytest.mark.parametrize("field", [name for name in UNSUPPORTED if "freeze" not in name])
def test_a_setting_that_the_backend_cannot_honour_is_refused(folder, field):
    own = folder / "refused"
    if not own.is_dir():
        tiny_models.write_model(own, "gpt2")
    section, name = field.split(".")
    run = runs.run_config(folder / "out", own, model={"backend": "transformers"})
    settings = getattr(run, section)
    kind = type(settings).model_fields[name]
    default = kind.get_default(call_default_factory=True)
    other = not default if isinstance(default, bool) else 2
    changed = run.model_copy(update={section: settings.model_copy(update={name: other})})
    hf_config = json.loads((own / "config.json").read_text())
    family = auto_family(hf_config)
    config = family.read(hf_config)
    require_backend(run, family, config)
    with pytest.raises(CapabilityError, match=f"{field}: "):
        require_backend(changed, family, config)


def test_attention_that_the_model_has_may_be_asked_for_and_no_other(folder):
    tiny_models.write_model(folder / "asked", "gpt2")
    family = auto_family(json.loads((folder / "asked" / "config.json").read_text()))
    traits = dataclasses.replace(family.outline.traits, attention="sdpa")
    outline = dataclasses.replace(family.outline, traits=traits)
    other = dataclasses.replace(family, outline=outline)
    for name in ("sdpa", "eager"):
        model = {"backend": "transformers", "attn_implementation": name}
        run = runs.run_config(folder / "out", folder / "asked", model=model)
        config = family.read(json.loads((folder / "asked" / "config.json").read_text()))
        require_backend(run, family, config)
        if name == "sdpa":
            require_backend(run, other, config)
        else:
            with pytest.raises(CapabilityError, match="needs transformers' sdpa attention"):
                require_backend(run, other, config)


@pytest.mark.slow
def test_auto_takes_our_decoder_where_there_is_one_and_native_refuses_the_rest():
    values = runs.TINY
    assert get_family(values) is FAMILIES["qwen3"]
    auto = get_family(values, "transformers")
    assert auto.architecture == "Qwen3ForCausalLM"
    assert dataclasses.asdict(auto.weight_map(auto.read(values)).config)["vocab_size"] == runs.VOCAB
    with pytest.raises(CapabilityError, match=r"model.backend is native.*'gpt2'"):
        get_family({"model_type": "gpt2"}, "native")


@pytest.mark.slow
def test_auto_takes_transformers_where_the_native_family_does_not_compute_a_config_and_says_why():
    values = runs.TINY | {"hidden_act": "relu"}
    auto = get_family(values)
    assert isinstance(auto, AutoFamily)
    assert "not native: hidden_act is 'relu'; silu, swish, gelu" in describe_backend(auto)
    native = get_family(values, "native")
    with pytest.raises(CapabilityError, match="hidden_act is 'relu'"):
        native.read(values)
    # Adapters need layers that checkpoints call as the model does.
    opt = {"model_type": "opt", **SIZES, "ffn_dim": 80, "dropout": 0.0}
    assert get_family(opt) is FAMILIES["opt"]
    adapted = get_family(opt, adapters=True)
    assert isinstance(adapted, AutoFamily)
    assert "cannot have adapters" in describe_backend(adapted)
    # What transformers computes as little is an error, and no reason to take it.
    assert get_family(runs.TINY | {"attention_dropout": 0.1}) is FAMILIES["qwen3"]
