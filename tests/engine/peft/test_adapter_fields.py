"""What the settings of adapters do to a run, and adapters that a run goes on from.

PEFT is the judge: what it saved is what a run starts with, and what the run exports loads there.
"""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.engine.peft.init_from_adapter import AdapterStart
from penstock.models.registry import get_family
from penstock.pipeline.origins import adapter_notes, resolve_model_source, with_adapter
from tests.engine import runs
from tests.engine.inputs import write_bases
from tests.engine.loops import decoder_of, each, loop_of, save, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    runs.write_rows(folder / "packed", 8)
    write_bases(folder)
    return folder


def base(folder, name="dense"):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)


def run_of(folder, out, lora, name="dense", model=None):
    """A run's config with what the adapter decides, in this process without a launcher."""
    lora = {"enable_lora": True, **lora}
    model = {"model_path": str(folder / name), "tokenizer_path": "builtin:bytes", **(model or {})}
    settings = {"model": model, "lora": lora, "data_parallel_mode": "none"}
    return with_adapter(runs.run_config(folder / out, folder / name, **settings))


def job_of(run, folder):
    return runs.job_of(run, folder / "packed")


def begun(job):
    """A checkpoint of what a run starts with, and one after a step."""
    loop = loop_of(job)
    save(loop)
    step(loop)
    save(loop)


def looked_at(job):
    """What a run trains, at which rate, and the rate that it tells of."""
    loop = loop_of(job)
    trained = {n: tuple(p.shape) for n, p in decoder_of(loop).named_parameters() if p.requires_grad}
    record = step(loop)
    names = {
        id(local_param.parameter): local_param.name
        for local_param in loop.built.engine.model.params
    }
    rates = {
        names[id(parameter)]: group["lr"]
        for group in loop.built.engine.optimizer.param_groups
        for parameter in group["params"]
    }
    return trained, rates, record["lr"]


def exported(job, number=0):
    """The folders of a checkpoint."""
    out = job.output_dir / f"exported {number}"
    write_folders(
        job.output_dir / "checkpoints" / f"global_step_{number}",
        resolve_model_source(job.config),
        ExportFormat(),
        out,
    )
    return out


@one_day_in(2, of=0)
def test_adapters_are_of_the_form_that_is_written(folder):
    targets = {"lora_rank": 4, "lora_target_modules": ["q_proj", "o_proj"]}
    forms = {
        "faster": {**targets, "lora_plus_ratio": 16.0},
        "normed": {**targets, "use_dora": True, "lora_bias": "all"},
        "own biases": {**targets, "lora_bias": "lora_only"},
        "pattern": {"lora_target_modules": ["layers.[1-9].*_proj"]},
        "all-linear": {"lora_target_modules": "all-linear"},
        "named": {"lora_target_modules": ["embed_tokens", "lm_head"]},
    }
    jobs = {
        name: job_of(run_of(folder, name, lora, model={"merge_qkv": False}), folder)
        for name, lora in forms.items()
    }
    [found] = on_ranks(1, each, looked_at, jobs)
    both = [f"model.layers.{n}.self_attn.{part}" for n in range(2) for part in ("q_proj", "o_proj")]
    factors = {
        f"{layer}.lora_{side}.{layer.rpartition('.')[2]}": (4, 32) if side == "A" else (32, 4)
        for layer in both
        for side in "AB"
    }
    norms = {f"{layer}.lora_magnitude.{layer.rpartition('.')[2]}": (32,) for layer in both}
    biases = {f"{layer}.bias": (32,) for layer in both}
    of_keys = {
        f"model.layers.{n}.self_attn.{part}.bias": (16,)
        for n in range(2)
        for part in ("k_proj", "v_proj")
    }
    assert found["faster"][0] == factors
    assert found["normed"][0] == factors | norms | biases | of_keys
    assert found["own biases"][0] == factors | biases
    for name in forms:
        trained, rates, told = found[name]
        assert told == runs.LR, "metrics show the schedule's"
        assert rates == {
            n: (16 if name == "faster" and ".lora_B." in n else 1) * runs.LR for n in trained
        }

    def adapted(name):
        return {n.rpartition(".lora_")[0] for n in found[name][0]}

    every = {n.removesuffix(".weight") for n, p in base(folder).named_parameters() if p.dim() == 2}
    assert adapted("named") == {"model.embed_tokens", "lm_head"}
    assert adapted("all-linear") == every - adapted("named")
    assert adapted("pattern") == {n for n in every if ".layers.1." in n}


ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
FORMS = {
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "normed": {"use_dora": True, "target_modules": ["embed_tokens", "k_proj", "up_proj"]},
    "biased": {"bias": "all", "target_modules": ["q_proj", "lm_head"]},
}


@pytest.fixture(scope="module")
def theirs(folder):
    """Adapters that PEFT made, in folders, and the models that they make of the base."""
    found = {}
    for name, form in FORMS.items():
        model = peft.get_peft_model(base(folder), peft.LoraConfig(r=6, lora_alpha=9, **form))
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / "peft" / name, save_embedding_layers=False)
        found[name] = model.eval()
    return found


@torch.no_grad()
def logits(model):
    return model.eval()(IDS, use_cache=False).logits


@one_day_in(2, of=0)
def test_an_adapter_of_peft_is_gone_on_with_exported_and_merged_as_it_is(folder, theirs):
    jobs = {}
    for name in FORMS:
        adapter = folder / "peft" / name
        run = run_of(folder, f"on {name}", {"init_adapter_path": str(adapter)})
        jobs[name] = runs.job_of(run, folder / "packed", adapter=adapter)
        assert (run.lora.lora_rank, run.lora.lora_alpha) == (6, 9)
    on_ranks(1, each, begun, jobs)
    for name, job in jobs.items():
        out = exported(job)
        mine = load_file(out / "adapter/adapter_model.safetensors")
        first = load_file(folder / "peft" / name / "adapter_model.safetensors")
        assert mine.keys() == first.keys(), name
        assert all(torch.equal(mine[key], tensor) for key, tensor in first.items()), name
        want = logits(theirs[name])
        again = peft.PeftModel.from_pretrained(base(folder), out / "adapter")
        torch.testing.assert_close(logits(again), want, atol=1e-6, rtol=1e-5)
        merged = transformers.AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
        state = theirs[name].merge_and_unload().state_dict()
        torch.testing.assert_close(
            dict(merged.state_dict()), dict(state), atol=1e-6, rtol=1e-5, msg=name
        )


OF_EXPERTS = {
    "each": ("experts", {"lora_target_modules": ["q_proj", "experts.*.up_proj"]}),
    "shared": ("experts", {"moe_shared_lora": True, "use_rslora": True}),
    "half shared": ("experts", {"moe_hybrid_shared_lora": True}),
    "in one": ("sinks", {"lora_rank": 3}),
    "in one, otherwise called": ("granitemoe", {"moe_shared_lora": True}),
    "gated": ("gated experts", {"lora_target_modules": "all-linear"}),
    "without a gate": (
        "experts without a gate",
        {"moe_hybrid_shared_lora": True, "lora_target_modules": "all-linear"},
    ),
}


@one_day_in(3, of=0)
def test_an_exported_adapter_of_experts_is_gone_on_with_as_it_is(folder):
    first = {
        name: job_of(run_of(folder, f"first {name}", lora, of), folder)
        for name, (of, lora) in OF_EXPERTS.items()
    }
    on_ranks(1, each, begun, first)
    second = {}
    for name, job in first.items():
        adapter = exported(job, 1) / "adapter"
        of, lora = OF_EXPERTS[name]
        written = {field: lora[field] for field in lora if field.startswith(("lora_t", "moe"))}
        if of in ("sinks", "granitemoe"):
            written["lora_target_modules"] = "all-linear"
        run = run_of(folder, f"second {name}", {**written, "init_adapter_path": str(adapter)}, of)
        second[name] = runs.job_of(run, folder / "packed", adapter=adapter)
    on_ranks(1, each, begun, second)
    for name, job in second.items():
        before, after = exported(first[name], 1), exported(job)
        for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
            old, new = load_file(before / file), load_file(after / file)
            assert old.keys() == new.keys()
            for key, tensor in old.items():
                torch.testing.assert_close(new[key], tensor, atol=1e-7, rtol=1e-6, msg=key)
            assert any(
                tensor.any() for key, tensor in old.items() if "lora_B" in key or "hf" in file
            )


REFUSED = {
    "another rank": ({"lora_rank": 5}, {}, ConfigError, r"lora_rank is 5, .* has 6 \(r\)"),
    "another form": ({"use_dora": True}, {}, ConfigError, "use_dora is true, .* has false"),
    "several ranks": ({}, {"rank_pattern": {"q_proj": 2}}, CapabilityError, "several ranks"),
    "whole modules": ({}, {"modules_to_save": ["lm_head"]}, CapabilityError, "penstock merge"),
    "no rank": ({}, {"r": 0}, ConfigError, "lora_rank: Input should be greater than 0"),
    "another kind": ({}, {"peft_type": "IA3"}, CapabilityError, "adapter of type IA3"),
    "an expression": (
        {},
        {"target_modules": ".*q_proj"},
        ConfigError,
        "selects its layers in a way",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_does_not_agree_or_is_not_trained_on_is_refused(
    what, folder, theirs, tmp_path
):
    assert theirs
    lora, changes, error, says = REFUSED[what]
    there = folder / "peft" / "rslora"
    said = json.loads((there / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**said, **changes}))
    weights = (there / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(error, match=says):
        run_of(folder, "refused", {"init_adapter_path": str(tmp_path), **lora})


def test_settings_that_an_adapter_overrides_are_reported(folder, theirs):
    assert theirs
    adapter = str(folder / "peft" / "rslora")
    model = {"model_path": str(folder / "dense"), "tokenizer_path": "builtin:bytes"}
    # Rank and alpha are written, but as their defaults.
    lora = {"init_adapter_path": adapter, "enable_lora": True, "lora_rank": 16, "lora_alpha": 16}
    settings = {"model": model, "lora": lora, "data_parallel_mode": "none"}
    written = runs.run_config(folder / "reported", folder / "dense", **settings)
    [line] = adapter_notes(written, with_adapter(written))
    assert "has lora_rank: 6 instead of 16, lora_alpha: 9 instead of 16, use_rslora: true" in line
    assert adapter_notes(with_adapter(written), with_adapter(written)) == ()


def test_an_adapter_of_other_layers_is_refused_before_it_is_trained(folder, theirs):
    assert theirs
    hf_config = json.loads((folder / "dense" / "config.json").read_text())
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    chosen = [f"model.layers.{n}.{layer}" for n in range(2) for layer in ADAPTED]
    adapter = folder / "peft" / "rslora"
    AdapterStart(adapter, chosen, names)
    more = "does not adapt model.layers.0.self_attn.k_proj, which lora.lora_target_modules names"
    with pytest.raises(ConfigError, match=more):
        AdapterStart(adapter, [*chosen, "model.layers.0.self_attn.k_proj"], names)
    with pytest.raises(ConfigError, match=r"adapts model.layers.1.mlp.down_proj as well"):
        AdapterStart(adapter, chosen[:-1], names)
    name = "model.layers.0.self_attn.q_proj.lora_A.q_proj"
    with pytest.raises(ConfigError, match=r"as \(6, 32\), and the run makes it \(4, 32\)"):
        AdapterStart(adapter, chosen, names)(name, (4, 32))
