"""Multi-token prediction: tensors that are not trained are carried, and trained ones predict."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import read_json, write_json
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.weight_files import prediction_tensors
from penstock.engine.model_source import ExportFormat
from penstock.engine.validate_model import require_mtp
from penstock.estimate.machine import check_model
from penstock.models.multimodal import is_language, language_config, text_name
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source
from penstock.rows.tokenizer import load_tokenizer
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import (
    before_each_update,
    each,
    gradients_of,
    loop_of,
    parameters_of,
    save,
    step,
)
from tests.engine.peft.test_multimodal import write_multimodal
from tests.engine.predicting import LAYERS, PREDICTING, Predicting, expected, write_rows
from tests.ranks import on_ranks
from tests.turns import one_day_in, taking_turns

pytestmark = pytest.mark.dist

HYBRID = {**MODELS["linear attention"], "num_hidden_layers": 4, "num_attention_heads": 8}
QWEN = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight")
CARRIED = {
    "qwen3_next": ("native", QWEN, HYBRID),
    "qwen3_next of transformers": ("transformers", QWEN, HYBRID),
    "mimo": ("native", ("model.mtp_layers.0.input_proj.weight",), {}),
}
"""Backend, names of tensors as published, and the model beside them."""


def with_tensors(folder, names, **model):
    """A model's folder with tensors of these names besides; they."""
    runs.write_model(folder, **model)
    [file] = folder.glob("*.safetensors")
    more = {name: torch.randn(3, 5).bfloat16() for name in names}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    load_tokenizer("builtin:bytes").save_pretrained(folder)
    return more


def trained(job):
    loop = loop_of(job)
    record = step(loop)
    save(loop)
    return record["loss"], record.get("mtp_loss", 0.0)


def exported(run, out, **form):
    """The tensors of a run's export, and its folder."""
    saved = f"{run.train.output_dir}/checkpoints/global_step_1"
    write_folders(type(out)(saved), resolve_model_source(run), ExportFormat(**form), out)
    return load_file(out / "hf/model.safetensors")


@pytest.mark.parametrize("name", taking_turns(CARRIED, 1))
def test_tensors_that_are_not_trained_are_exported_byte_for_byte(name, tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    backend, tensors, model = CARRIED[name]
    was = with_tensors(tmp_path / "model", tensors, **model)
    path = str(tmp_path / "model")
    run = runs.run_config(
        tmp_path / "run",
        tmp_path / "model",
        model={"model_path": path, "tokenizer_path": path, "backend": backend},
        data_parallel_mode="none",
    )
    on_ranks(1, trained, runs.job_of(run, tmp_path / "packed"))
    now = exported(run, tmp_path / "out")
    for tensor, before in was.items():
        assert now[tensor].dtype == before.dtype, tensor
        assert torch.equal(now[tensor], before), tensor


WEIGHT = 0.3


def predicting(name):
    return Predicting("deepseek_v3", 2) if name == "two depths" else Predicting(name)


@cache
def wanted_of(name, packed):
    """The losses and the gradients of transformers' modules."""
    return expected(predicting(name), packed, WEIGHT)


def job(folder, name, out="run", **train):
    """A run of a model, which is written for the first."""
    if name in (*PREDICTING, "two depths") and not (folder / name).is_dir():
        predicting(name).save(folder / name)
    settings = {"mtp_loss_weight": WEIGHT, "max_steps": 1, "max_grad_norm": 0, **train}
    settings.setdefault("data_parallel_mode", "none")
    path = str(folder / name)
    model = {"model_path": path, "tokenizer_path": path, **settings.pop("model", {})}
    run = runs.run_config(folder / f"{name} {out}", folder / name, model=model, **settings)
    return runs.job_of(run, folder / "packed")


def first_step(job):
    """The record of a step, and the gradients before its update."""
    loop = loop_of(job)
    found = before_each_update(loop, lambda: gradients_of(loop))
    record = step(loop)
    return record["loss"], record["mtp_loss"], record["grad_norm"], found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicting")
    write_rows(folder / "packed")
    return folder


def learned(tensors):
    """Names of those that a gradient trains."""
    return {n for n in tensors if "e_score_correction_bias" not in n and ".indexer." not in n}


ALIKE = {"glm_moe_dsa"}
"""Models that differ from another one in what other tests show."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*(PREDICTING.keys() - ALIKE), "two depths"], id="models"),
        pytest.param(sorted(ALIKE), id="models alike", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_and_every_gradient_are_those_of_the_formula_in_transformers_modules(folder, names):
    jobs = {name: job(folder, name) for name in names}
    [found] = on_ranks(1, each, first_step, jobs)
    for name, (loss, mtp_loss, _, gradients) in found.items():
        main, further, wanted = wanted_of(name, folder / "packed")
        assert loss == pytest.approx(main, rel=1e-5), name
        assert mtp_loss == pytest.approx(further, rel=1e-5), name
        assert gradients.keys() >= learned(wanted), name
        for tensor in learned(wanted):
            got, norm = torch.tensor(gradients[tensor]), wanted[tensor].norm()
            assert (got - wanted[tensor]).norm() <= 1e-5 * norm, f"{name}: {tensor}"


@pytest.mark.dist
@one_day_in(3, of=2)
def test_every_depth_weighs_its_labels_as_the_formula_does(tmp_path):
    write_rows(tmp_path / "packed", is_weighted=True)
    layouts = {"alone": {"data_parallel_mode": "none"}}
    assert_alike(tmp_path, 1, {"two depths": layouts})
    layouts = {name: MORE["two depths"][name] for name in ("zero 2", "tp 2", "ep 2")}
    assert_alike(tmp_path, 2, {"two depths": layouts})


PIPELINE = {"pipeline_parallel_size": 2, "micro_batch_size": 1}
MORE = {
    "two depths": {
        "zero 2": {"zero_stage": 2},
        "ddp": {"data_parallel_mode": "ddp"},
        "reentrant": {"enable_reentrant": True},
        "kept": {"enable_gradient_checkpointing": False},
        "parts recomputed": {"recompute_modules": ["mlp", "self_attn"]},
        "offloaded": {"enable_activation_offload": True, "optimizer_offload": "cpu"},
        "tp 2": {"tensor_parallel_size": 2, "model": {"merge_qkv": False}},
        "tp 2, gathered": {"tensor_parallel_size": 2, "tp_vocab_parallel_loss": False},
        "ep 2": {"expert_parallel_size": 2},
        "prefetch": {"enable_forward_prefetch": True},
        "muon": {"optimizer": "muon"},
    },
    "glm4_moe": {
        "tp 2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "ep 2 over tp 2": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    },
    "qwen3_next": {
        "tp 2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "ep 2": {"expert_parallel_size": 2, "moe_checkpoint_method": "moe_act"},
    },
}


def assert_alike(folder, world, layouts):
    """Losses and gradients of every layout are those of transformers' modules."""
    jobs, of = {}, {}
    for name, named in layouts.items():
        for layout, train in named.items():
            of[f"{name}, {layout}"] = name
            jobs[f"{name}, {layout}"] = job(
                folder, name, layout, **{"data_parallel_mode": "fsdp2", **train}
            )
    found = on_ranks(world, each, first_step, jobs)[0]
    for layout, (loss, mtp_loss, norm, gradients) in found.items():
        name = of[layout]
        main, further, wanted = wanted_of(name, folder / "packed")
        assert loss == pytest.approx(main, rel=1e-5), layout
        assert mtp_loss == pytest.approx(further, rel=1e-5), layout
        whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        assert norm == pytest.approx(whole.item(), rel=1e-5), layout
        for tensor in learned(wanted):
            got, length = torch.tensor(gradients[tensor]), wanted[tensor].norm()
            assert (got - wanted[tensor]).norm() <= 2e-5 * length, f"{layout}: {tensor}"


@one_day_in(3, of=0)
def test_two_ranks_compute_what_transformers_modules_do(folder):
    fsdp2 = {"data_parallel_shard_size": 2}
    layouts = {
        "two depths": {"fsdp2": fsdp2, "pp 2": PIPELINE, "ring 2": {"ringattn_parallel_size": 2}},
        "qwen3_next": {"fsdp2": fsdp2, "ulysses 2": {"ulysses_parallel_size": 2}},
    }
    assert_alike(folder, 2, layouts)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_layout_computes_what_transformers_modules_do(folder):
    assert_alike(folder, 2, MORE)


RING, ULYSSES, TP = ({f"{axis}_parallel_size": 2} for axis in ("ringattn", "ulysses", "tensor"))
SPLIT = {**TP, "sequence_parallel": True}
IN_PIPELINES = {
    2: {
        "two depths": {
            "ddp": {**PIPELINE, "data_parallel_mode": "ddp"},
            "ZBV": {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "interleaved": {**PIPELINE, "pipeline_parallel_schedule": "Interleaved1F1B"},
            "split by hand": {**PIPELINE, "pipeline_parallel_split": [0, 2]},
            "ring 2, ddp": {**RING, "data_parallel_mode": "ddp"},
            "ulysses 2": ULYSSES,
        },
        "qwen3_5_text": {
            "pp 2": PIPELINE,
            "ZBV": {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "zero bubble": {**PIPELINE, "pipeline_parallel_schedule": "InterleavedZeroBubble"},
            "DualPipeV": {**PIPELINE, "pipeline_parallel_schedule": "DualPipeV"},
            "ring 2": RING,
        },
        "glm4_moe": {"ep 2 over ring 2": {**RING, "expert_parallel_size": 2}},
        "qwen3_next": {"ring 2": RING},
    },
    4: {
        "two depths": {
            "pp 2 x shard 2": {**PIPELINE, "data_parallel_shard_size": 2},
            "pp 2 x ring 2": {**PIPELINE, **RING},
            "ring 2 x ulysses 2": {**RING, **ULYSSES},
            "ulysses 2 x tp 2": {**ULYSSES, **SPLIT},
        },
        "deepseek_v32": {"pp 2 x tp 2": {**PIPELINE, **SPLIT}},
        "glm4_moe": {"pp 2 x tp 2": {**PIPELINE, **SPLIT}, "ring 2 x tp 2": {**RING, **SPLIT}},
        "qwen3_5_text": {
            "pp 2 x tp 2": {**PIPELINE, **SPLIT},
            "ZBV x shard 2": {
                **PIPELINE,
                "pipeline_parallel_schedule": "ZBVZeroBubble",
                "data_parallel_shard_size": 2,
            },
        },
    },
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("world", IN_PIPELINES)
def test_more_pipelines_and_divided_rows_compute_what_transformers_modules_do(folder, world):
    assert_alike(folder, world, IN_PIPELINES[world])


def train_two(job):
    """Two steps with a checkpoint of each: the losses of the second."""
    loop = loop_of(job)
    step(loop)
    save(loop)
    record = step(loop)
    save(loop)
    return record["loss"], record["mtp_loss"]


def two_losses(job):
    record = step(loop_of(job))
    return record["loss"], record["mtp_loss"]


def in_checkpoint(run, number=2):
    reader = CheckpointReader(Path(run.output_dir) / f"checkpoints/global_step_{number}")
    return reader.read(reader.shapes())


@pytest.fixture(scope="module")
def trained_twice(folder):
    """Runs of two steps, by model; and the losses of the second step."""
    jobs = {name: job(folder, name, "whole", **TWICE) for name in EXPORTED}
    [done] = on_ranks(1, each, train_two, jobs)
    return jobs, done


TWICE = {"max_steps": 2, "num_train_epochs": 2, "lr": 0.01}
EXPORTED = {"deepseek_v3": "num_nextn_predict_layers", "qwen3_next": "num_nextn_predict_layers"}


@one_day_in(3, of=1)
def test_a_resumed_run_ends_with_the_same_bits(folder, trained_twice):
    jobs, _ = trained_twice
    again = {}
    for name, whole in jobs.items():
        there = str(whole.output_dir / "checkpoints/global_step_1")
        again[name] = job(folder, name, "again", load_checkpoint_path=there, **TWICE)
    on_ranks(1, each, runs.train_here, again)
    for name, resumed in again.items():
        got, want = in_checkpoint(resumed), in_checkpoint(jobs[name])
        assert got.keys() == want.keys()
        assert all(torch.equal(got[tensor], want[tensor]) for tensor in want), name


@pytest.mark.exhaustive
def test_a_pipeline_ends_with_the_weights_of_one_process(folder, trained_twice):
    jobs, _ = trained_twice
    layout = {"data_parallel_mode": "fsdp2", **PIPELINE, **TWICE}
    cut = {name: job(folder, name, "in stages", **layout) for name in jobs}
    on_ranks(2, each, train_two, cut)
    for name, stages in cut.items():
        got, want = in_checkpoint(stages), in_checkpoint(jobs[name])
        assert got.keys() == want.keys()
        for tensor, whole in want.items():
            torch.testing.assert_close(got[tensor], whole, rtol=1e-4, atol=2e-4, msg=tensor)
        exported(stages.config, folder / f"{name} in stages")


def test_an_export_has_the_trained_layers_as_published_and_predicts_as_the_model(
    folder, trained_twice
):
    jobs, done = trained_twice
    for name, whole in jobs.items():
        now = exported(whole.config, folder / f"{name} step 1")
        was = load_file(folder / name / "model.safetensors")
        assert now.keys() == was.keys(), name
        further = [n for n in prediction_tensors(was, LAYERS) if "norm" in n or "_proj" in n]
        # An expert that no token chose stays.
        still = [n for n in further if torch.equal(now[n], was[n]) and ".experts." not in n]
        assert further
        assert not still
        if name == "deepseek_v3":
            at = f"model.layers.{LAYERS}"
            assert torch.equal(now[f"{at}.embed_tokens.weight"], now["model.embed_tokens.weight"])
            assert torch.equal(now[f"{at}.shared_head.head.weight"], now["lm_head.weight"])
        transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name} step 1/hf")
    again = {name: job(folder, f"{name} step 1/hf", lr=0) for name in jobs}
    [found] = on_ranks(1, each, two_losses, again)
    for name, losses in found.items():
        assert losses == pytest.approx(done[name], rel=1e-5)


def test_dropped_layers_are_neither_in_the_export_nor_in_its_config(folder, trained_twice):
    for name, whole in trained_twice[0].items():
        now = exported(whole.config, folder / f"{name} dropped", mtp="drop")
        was = load_file(folder / name / "model.safetensors")
        assert now.keys() == was.keys() - {*prediction_tensors(was, LAYERS)}
        said = read_json(folder / f"{name} dropped/hf/config.json")
        assert said[EXPORTED[name]] == 0


@pytest.mark.slow
def test_those_of_a_multimodal_model_are_trained_like_those_of_its_text_model(folder):
    whole, text = folder / "whole", folder / "text"
    write_multimodal(whole, "qwen3_5")
    said = read_json(whole / "config.json")
    family = get_family(said)
    config = family.trained_config(said, mtp=True)
    shapes = family.weight_map(config).hf_shapes()
    generator = torch.Generator().manual_seed(0)
    more = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
        if name.startswith("mtp.")
    }
    tensors = {n: t for file in whole.glob("*.safetensors") for n, t in load_file(file).items()}
    for file in whole.glob("model*"):
        file.unlink()
    save_file(tensors | more, whole / "model.safetensors", {"format": "pt"})
    text.mkdir()
    own = {text_name(n): t for n, t in tensors.items() if is_language(n)}
    save_file(own | more, text / "model.safetensors", {"format": "pt"})
    write_json(text / "config.json", dict(language_config(said)))
    jobs = {name: job(folder, name, lr=0.01) for name in ("whole", "text")}
    jobs["text"] = job(folder, "text", model={"tokenizer_path": "builtin:bytes"}, lr=0.01)
    [found] = on_ranks(1, each, trained, jobs)
    assert found["whole"] == pytest.approx(found["text"], rel=1e-6)
    now = exported(jobs["whole"].config, folder / "whole out")
    assert now.keys() == tensors.keys() | more.keys()
    for name, tensor in (tensors | more).items():
        is_trained = is_language(name) or name in more
        assert torch.equal(now[name], tensor) is not is_trained, name


def balanced_step(job):
    loop = loop_of(job)
    record = step(loop)
    return record["routers"], record["clipped_heads"], parameters_of(loop)


@pytest.mark.slow
def test_balancing_and_qk_clip_reach_its_block(folder):
    settings = {
        **{"optimizer": "sgd", "lr": 0, "qk_clip_threshold": 1e-3, "micro_batch_size": 1},
        **{"moe_bias_update_rate": 0.01, "moe_aux_loss_coef": 0.1},
        "moe_global_load_balancing": True,
    }
    balanced = job(folder, "deepseek_v3", "balanced", **settings)
    [(routers, clipped, after)] = on_ranks(1, balanced_step, balanced)
    assert routers["layers"] == [1, LAYERS]
    assert clipped == 8 * (LAYERS + 1)
    was = load_file(folder / "deepseek_v3/model.safetensors")
    for part in ("self_attn.q_b_proj.weight", "mlp.gate.e_score_correction_bias"):
        name = f"model.layers.{LAYERS}.{part}"
        assert not torch.equal(torch.tensor(after[name]), was[name].float()), name


def test_what_cannot_be_trained_is_refused_before_any_work(folder):
    for more in (
        {"lora": {"enable_lora": True}},
        {"objective": "preference"},
    ):
        with pytest.raises(ConfigError, match="mtp_loss_weight"):
            job(folder, "deepseek_v3", "refused", **more)
    run = job(folder, "deepseek_v3", "refused").config
    said = read_json(folder / "deepseek_v3/config.json")
    for changes, error, says in (
        ({"num_nextn_predict_layers": 0}, ConfigError, "no layers that predict further tokens"),
        ({"model_type": "qwen3_next", "num_nextn_predict_layers": 2}, CapabilityError, "is 2"),
        (runs.TINY, CapabilityError, "layers of a qwen3 that predict further tokens are not"),
    ):
        with pytest.raises(error, match=says):
            require_mtp(run.train, {**said, **changes})
    check_model(run)
    whole = load_file(folder / "deepseek_v3/model.safetensors")
    lacking = folder / "lacking"
    lacking.mkdir()
    write_json(lacking / "config.json", said)
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    save_file({n: t for n, t in whole.items() if n != name}, lacking / "model.safetensors")
    with pytest.raises(CapabilityError, match=name):
        check_model(job(folder, "lacking", "refused").config)
