"""Adapters over quantized weights: what is quantized, and what a run then computes.

The judge is the same run over a folder of unquantized weights that hold what codes stand for.
"""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.engine.quantization.select_layers import matrices
from penstock.models.automodel.family import auto_family
from penstock.pipeline.origins import resolve_model_source
from penstock_kernels.quant import FORMATS, dequantize, get_format, quantize
from tests.engine import runs
from tests.engine.automodel.tiny_models import tiny_config
from tests.engine.inputs import MODELS
from tests.engine.loops import decoder_of, each, looked_at, loop_of, save, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

QUANTIZED = (".self_attn.", ".mlp.")
FORMS = {
    "nf4": FORMATS["nf4"],
    "nf4 of groups": get_format("nf4", 16),
    "nvfp4": FORMATS["nvfp4"],
    "block_fp8": FORMATS["block_fp8"],
    "int8": FORMATS["int8"],
    "few bits": FORMATS["int8"],
}
LORA = {"enable_lora": True, "lora_rank": 4}
STACKED = ("sinks", "llama 4")
"""Models with one tensor [experts, in, out] for all experts of a layer."""
MORE = {"llama 4": {"no_rope_layers": [1, 0], "moe_layers": [1]}}
"""What fits the number of layers here."""
OF_FORM = {
    **{name: {"quant_format": name} for name in FORMS},
    "nvfp4": {},
    "nf4 of groups": {"quant_format": "nf4", "quant_group_size": 16},
    "few bits": {"quant_format": "int8_int4_experts"},
}


def is_matrix(name, tensor):
    """Whether a checkpoint's tensor is of a linear layer within a block."""
    is_router = name.endswith(("mlp.gate.weight", "norm.weight"))
    return tensor.dim() == 2 and any(part in name for part in QUANTIZED) and not is_router


def rounded(name, tensor, form):
    """What the codes of a matrix stand for."""
    if not is_matrix(name, tensor):
        return tensor
    kept = FORMATS["int4"] if form == "few bits" and ".experts." in name else FORMS[form]
    return dequantize(quantize(tensor, kept), torch.float32).contiguous()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qlora")
    runs.write_rows(folder / "packed", 24)
    for kind in ("untied", "experts", "granitemoe", *STACKED):
        config = transformers.AutoConfig.for_model(
            **{**runs.TINY, **MODELS[kind], **MORE.get(kind, {})}
        )
        config.dtype = torch.float32
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    for form in FORMS:
        base = folder / ("experts" if form == "few bits" else "untied")
        (folder / form).mkdir()
        weights = load_file(base / "model.safetensors")
        weights = {name: rounded(name, tensor, form) for name, tensor in weights.items()}
        save_file(weights, folder / form / "model.safetensors", {"format": "pt"})
        (folder / form / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def job_of(folder, kind, out, lora, **train):
    model = {"model_path": str(folder / kind), "tokenizer_path": "builtin:bytes"}
    model |= train.pop("model", {})
    settings = {"model": model, "lora": {**LORA, **lora}, "data_parallel_mode": "none", **train}
    run = runs.run_config(folder / out, folder / kind, **settings)
    return runs.job_of(run, folder / "packed")


def quantized(folder, form, out, **lora):
    """A run over codes."""
    kind = "experts" if form == "few bits" else "untied"
    return job_of(folder, kind, out, {"enable_qlora": True, **OF_FORM[form], **lora})


def trained(job):
    """Losses of three steps and of an evaluation, the adapters, and what holds the weights."""
    loop = loop_of(job)
    losses = [step(loop)["loss"] for _ in range(3)]
    save(loop)
    named = dict(decoder_of(loop).named_parameters())
    bytes_of = {name: p.nbytes for name, p in named.items() if p.dtype == torch.uint8}
    factors = {name: p.detach().numpy().copy() for name, p in named.items() if p.requires_grad}
    evaluated = looked_at(loop, next(loop._loader)) if loop._loader else None
    return losses, factors, bytes_of, evaluated


@one_day_in(2, of=1)
def test_codes_train_as_the_weights_that_they_stand_for(folder):
    jobs = {f"{form}, codes": quantized(folder, form, f"{form}, codes") for form in FORMS}
    jobs |= {form: job_of(folder, form, f"{form}, weights", {}) for form in FORMS}
    [found] = on_ranks(1, each, trained, jobs, timeout=120)
    for form in FORMS:
        losses, factors, held, evaluated = found[f"{form}, codes"]
        wanted = found[form]
        assert losses == pytest.approx(wanted[0], rel=1e-6), form
        assert evaluated == pytest.approx(wanted[3], rel=1e-6)
        for name, factor in factors.items():
            np.testing.assert_allclose(factor, wanted[1][name], rtol=1e-5, atol=1e-6)
        assert held
        assert not wanted[2]
        assert all(any(part in name for part in QUANTIZED) for name in held)
    losses = {form: found[f"{form}, codes"][0] for form in FORMS}
    assert len({tuple(of) for of in losses.values()}) == len(FORMS), "every format is another"
    held = found["few bits, codes"][2]
    sizes = [
        sum(size for name, size in held.items() if name.startswith(f"model.layers.{layer}"))
        for layer in ("0.mlp.experts", "1.mlp.gate_proj")
    ]
    # Four bits and groups of 128, of matrices 40 x 32 and 32 x 20; eight, and a scale for a row.
    assert sizes == [8 * (40 + 32) * (64 + 4), 48 * (32 + 4)]


def test_what_is_exported_is_what_was_trained(folder):
    jobs = {
        "codes": quantized(folder, "nf4", "exported codes"),
        "weights": job_of(folder, "nf4", "exported weights", {}),
    }
    on_ranks(1, each, trained, jobs)
    files = {}
    for name, job in jobs.items():
        last = job.output_dir / "checkpoints" / "global_step_3"
        write_folders(
            last,
            resolve_model_source(job.config),
            ExportFormat(),
            out := job.output_dir / "exported",
        )
        files[name] = load_file(out / "hf" / "model.safetensors")
    assert files["codes"].keys() == files["weights"].keys()
    for name, tensor in files["weights"].items():
        torch.testing.assert_close(files["codes"][name], tensor, rtol=1e-5, atol=1e-6)


def of_stacks(weights):
    """What the codes of NF4 stand for, where a stack of experts is quantized along its inputs."""
    found = {}
    for name, tensor in weights.items():
        rows = tensor.mT.flatten(0, 1) if tensor.dim() == 3 else tensor
        is_matrix = rows.dim() == 2 and ".layers." in name and "router" not in name
        value = quantize(rows, FORMS["nf4 of groups"]) if is_matrix else None
        rows = rows if value is None else dequantize(value, torch.float32)
        whole = rows.unflatten(0, (len(tensor), -1)).mT if tensor.dim() == 3 else rows
        found[name] = whole.contiguous()
    return found


@pytest.mark.parametrize("kind", STACKED)
def test_stacks_of_experts_are_quantized_as_their_matrices_are(folder, kind):
    floats = f"{kind} floats"
    (folder / floats).mkdir()
    weights = of_stacks(load_file(folder / kind / "model.safetensors"))
    save_file(weights, folder / floats / "model.safetensors", {"format": "pt"})
    (folder / floats / "config.json").write_bytes((folder / kind / "config.json").read_bytes())
    targets = {"lora_target_modules": ["q_proj", "v_proj"]}
    settings = {"enable_qlora": True, **OF_FORM["nf4 of groups"], **targets}
    jobs = {
        "codes": job_of(folder, kind, f"{kind} codes", settings),
        "weights": job_of(folder, floats, f"{kind} weights", targets),
    }
    [found] = on_ranks(1, each, trained, jobs)
    (losses, factors, held, _), wanted = found["codes"], found["weights"]
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    for name, factor in factors.items():
        np.testing.assert_allclose(factor, wanted[1][name], rtol=1e-5, atol=1e-6)
    assert any(".experts." in name for name in held)
    out = jobs["codes"].output_dir / "exported"
    saved = jobs["codes"].output_dir / "checkpoints" / "global_step_3"
    write_folders(saved, resolve_model_source(jobs["codes"].config), ExportFormat(), out)
    exported = load_file(out / "hf" / "model.safetensors")
    for name in (name for name in weights if ".experts." in name):
        torch.testing.assert_close(exported[name], weights[name], rtol=1e-5, atol=1e-6)


def test_modules_that_are_excluded_stay_as_they_are(folder):
    left_out = {
        "attention": ["self_attn"],
        "pattern": ["layers.0.*"],
        "two": ["layers.1.mlp.up_proj", "o_proj"],
    }
    jobs = {
        name: quantized(folder, "nf4", f"without {name}", exclude_modules=entries)
        for name, entries in left_out.items()
    }
    [found] = on_ranks(1, each, trained, jobs)
    layers = {
        name: {
            local_param.rpartition(".weight.")[0].removeprefix("model.layers.")
            for local_param in result[2]
        }
        for name, result in found.items()
    }
    network = {f"{n}.mlp.{part}_proj" for n in range(2) for part in ("gate", "up", "down")}
    attention = {f"{n}.self_attn.{part}_proj" for n in range(2) for part in ("qkv", "o")}
    assert layers["attention"] == network
    assert layers["pattern"] == {name for name in network | attention if name.startswith("1")}
    assert layers["two"] == network - {"1.mlp.up_proj"} | {"0.self_attn.qkv_proj"} | {
        "1.self_attn.qkv_proj"
    }


def noisy(job):
    """The loss of a step, of the same rows without a gradient, and of the step after it."""
    loop = loop_of(job)
    first = step(loop)["loss"]
    assert loop._loader
    rows = next(loop._loader)
    evaluated = [looked_at(loop, rows) for _ in range(2)]
    for group in loop.built.engine.optimizer.param_groups:
        group["rate"] = 0.0
    again = [loop.built.engine.step(rows, 0.0, number).loss for number in (1, 1, 2)]
    return first, evaluated, again


def test_noise_is_that_of_a_step_and_of_training_alone(folder):
    noises = {
        "none": {},
        "some": {"enable_aqn": True},
        "more": {"enable_aqn": True, "aqn_alpha": 3.0},
        "no": {"enable_aqn": True, "aqn_alpha": 0.0},
    }
    jobs = {name: quantized(folder, "nvfp4", name, **lora) for name, lora in noises.items()}
    [found] = on_ranks(1, each, noisy, jobs)
    first = {name: result[0] for name, result in found.items()}
    assert first["no"] == first["none"] != first["some"] != first["more"]
    far = {name: abs(first[name] - first["none"]) for name in ("some", "more")}
    assert far["more"] > far["some"]
    for _, (one, other), (step_1, step_1_again, _) in found.values():
        assert one == other, "an evaluation has no noise"
        assert step_1 == step_1_again, "a step has its noise"
    assert found["none"][2][1] == found["none"][2][2]
    assert found["some"][2][1] != found["some"][2][2], "another step has another"


@pytest.mark.parametrize(
    ("kind", "lora", "said"),
    [
        ("untied", {"exclude_modules": ["self_atn"]}, "'self_atn' names no module.*self_attn"),
        ("untied", {"exclude_modules": ["q_proj"]}, "merge_qkv: false, or leave all three out"),
        ("experts", {"exclude_modules": ["experts.3"]}, "experts of a layer are kept alike"),
        ("granitemoe", {}, r"exclude_modules: \[experts\]"),
    ],
)
def test_what_cannot_be_quantized_is_refused(kind, lora, said, folder):
    job = job_of(folder, kind, "refused", {"enable_qlora": True, **lora})
    with pytest.raises((CapabilityError, ConfigError), match=said):
        loop_of(job)


def test_weights_that_are_no_numbers_are_refused_by_name(folder, tmp_path):
    weights = load_file(folder / "untied" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "untied" / "config.json").read_bytes())
    job = job_of(tmp_path.parent, tmp_path.name, "broken", {"enable_qlora": True})
    with pytest.raises(CapabilityError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        loop_of(job)


def test_a_router_of_transformers_that_is_a_linear_layer_is_not_quantized():
    config = tiny_config("hunyuan_v1_moe").to_dict() | {"num_experts": 4, "moe_topk": 2}
    family = auto_family(config)
    names = family.weight_map(family.read(config))
    quantized = dict(matrices(names, family.roles))
    assert "model.layers.0.self_attn.q_proj.weight" in quantized
    assert "model.layers.0.mlp.gate.wg" in family.outline.linear
    assert not [name for name in quantized if ".gate." in name]
