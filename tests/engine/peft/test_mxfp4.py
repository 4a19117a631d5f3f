"""gpt-oss as it is published: experts in MXFP4, read as transformers dequantizes them."""

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json, write_json
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import ExportFormat, QuantizationArgs
from penstock.engine.quantization.mxfp4 import Mxfp4Tensors
from penstock.estimate.machine import check_model, check_weights
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source
from penstock_kernels.quant import FORMATS
from penstock_kernels.quant.formats import E2M1
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, save, step
from tests.models.twins import documents, their_logits
from tests.ranks import on_ranks

NAME = "model.layers.0.mlp.experts.gate_up_proj"
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As OpenAI publishes it."""


def quantized(weight_EKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of OCP's reference: the exponent of the largest magnitude, less 2."""
    groups = weight_EKN.mT.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    steps = groups / exponents.exp2().unsqueeze(-1)
    codes = (steps.unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def publish(folder):
    """A folder as gpt-oss is published, and its experts as transformers dequantizes them."""
    runs.write_model(folder, **GPT_OSS)
    tensors = load_file(folder / "model.safetensors")
    floats = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = quantized(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales)
    plain = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(plain, folder / "model.safetensors")
    config = {n: v for n, v in read_json(folder / "config.json").items() if n != "dtype"}
    write_json(folder / "config.json", {**config, "quantization_config": QUANTIZATION})
    return plain, floats


def is_mxfp4(name: str) -> bool:
    return name.endswith(("_blocks", "_scales"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def test_any_box_has_the_bits_that_transformers_makes_of_it(tmp_path):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=generator).to(torch.uint8)
    # All exponents but NaN's: the largest overflow, the least are subnormal.
    scales = torch.randint(255, (3, 10, 4), generator=generator).to(torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 253, 254])
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, tmp_path / "model.safetensors")
    whole = convert_moe_packed_tensors(blocks, scales)
    with SafetensorsFolder(tmp_path) as folder:
        tensors = Mxfp4Tensors(folder)
        tensors.require([NAME])
        assert (tensors.stored(NAME).shape, tensors.stored(NAME).dtype) == (
            whole.shape,
            whole.dtype,
        )
        for box in (
            ((0, 0, 0), whole.shape),
            ((1, 0, 0), (1, 128, 10)),
            ((2, 64, 3), (1, 64, 4)),
            ((0, 30, 9), (3, 5, 1)),
            ((1, 40, 0), (0, 8, 10)),
        ):
            cut = whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
            assert torch.equal(bits(tensors.box(NAME, *box)), bits(cut.contiguous()))


@pytest.mark.parametrize(
    ("blocks", "scales", "fault"),
    [
        (torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2), "it is torch.float32"),
        (torch.zeros(2, 8, 2, 8, dtype=torch.uint8), torch.zeros(1), "groups of 16 bytes"),
        (torch.zeros(2, 8, 2, 16, dtype=torch.uint8), None, "_scales .*it is not there"),
        (
            torch.zeros(2, 8, 2, 16, dtype=torch.uint8),
            torch.zeros(2, 8, 3, dtype=torch.uint8),
            r"would be torch.uint8 \(2, 8, 2\)",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_fit_together_are_refused(blocks, scales, fault, tmp_path):
    stored = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    save_file({n: t for n, t in stored.items() if t is not None}, tmp_path / "model.safetensors")
    with (
        SafetensorsFolder(tmp_path) as folder,
        pytest.raises(CapabilityError, match=f"(?s){fault}.*Name the model"),
    ):
        Mxfp4Tensors(folder).stored(NAME)


def run_of(folder, out, lora=None, **train):
    settings = {"model_path": str(folder / "published"), "tokenizer_path": "builtin:bytes"}
    train = {"lr": 0.01, "num_train_epochs": 3, **train}
    return runs.run_config(
        folder / out, folder / "published", model=settings, lora=lora or {}, **train
    )


def steps(job):
    loop = loop_of(job)
    begun = parameters_of(loop)
    records = [step(loop), step(loop), step(loop)]
    save(loop)
    return begun, parameters_of(loop), [record["loss"] for record in records]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_weights_and_adapters_learn_from_published_experts_and_are_exported_in_bfloat16(tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    plain, floats = publish(tmp_path / "published")
    lora = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "gate_up_proj"]}
    two = {"data_parallel_mode": "fsdp2"}
    made = {
        "weights": run_of(tmp_path, "weights", **two, data_parallel_shard_size=2),
        "adapters": run_of(
            tmp_path, "adapters", lora, **two, data_parallel_shard_size=2, expert_parallel_size=2
        ),
        "codes": run_of(
            tmp_path,
            "codes",
            {**lora, "enable_qlora": True},
            **two,
            data_parallel_shard_size=2,
            expert_parallel_size=2,
        ),
        "tensor": run_of(
            tmp_path, "tensor", lora, tensor_parallel_size=2, load_weights_mode="all_ranks"
        ),
    }
    jobs = {}
    for name, run in made.items():
        check_weights(run)
        check_model(run)
        jobs[name] = runs.job_of(run, tmp_path / "packed")
    found = on_ranks(2, each, steps, jobs)[0]
    stored = {name: tensor for name, tensor in plain.items() if not is_mxfp4(name)}
    for name, (begun, _, losses) in found.items():
        for tensor, value in {**stored, **({} if name == "codes" else floats)}.items():
            assert np.array_equal(begun[tensor], value.float().numpy()), (name, tensor)
        assert losses[-1] < losses[0], name
    for name in ("codes", "tensor"):
        assert found[name][2] == pytest.approx(found["adapters"][2], rel=1e-5)
    for name in floats:
        # As published, to the bit, before and after.
        for values in found["codes"][:2]:
            codes, scales = plain[f"{name}_blocks"], plain[f"{name}_scales"]
            rows = codes.shape[0] * codes.shape[1]
            assert np.array_equal(values[f"{name}.codes"], codes.reshape(rows, -1).numpy())
            assert np.array_equal(values[f"{name}.scales"], scales.flatten(0, 1).numpy())
            assert name not in values
    exported = {}
    for name in ("weights", "adapters", "codes"):
        saved = tmp_path / name / "checkpoints/global_step_3"
        out = tmp_path / name / "exported"
        write_folders(saved, resolve_model_source(made[name]), ExportFormat(), out)
        config = read_json(out / "hf/config.json")
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config
        merged = load_file(out / "hf/model.safetensors")
        assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
        assert merged.keys() == stored.keys() | floats.keys()
        exported[name] = merged
    for name, value in exported["adapters"].items():
        torch.testing.assert_close(exported["codes"][name], value, rtol=2**-7, atol=1e-6)
    # peft's adapter on transformers' own reading of the published folder is what was merged.
    named = read_json(tmp_path / "adapters/exported/adapter/adapter_config.json")
    assert named["base_model_name_or_path"] == str(tmp_path / "published")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "published",
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    for name, value in floats.items():
        assert torch.equal(bits(model.state_dict()[name]), bits(value))
    adapted = PeftModel.from_pretrained(model.float(), tmp_path / "adapters/exported/adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "adapters/exported/hf", dtype=torch.float32, attn_implementation="eager"
    )
    document = documents([20])[0][0]
    # Merged weights are rounded to bfloat16.
    torch.testing.assert_close(
        their_logits(merged, document), their_logits(adapted, document), rtol=0, atol=0.02
    )


@pytest.mark.dist
def test_adapters_are_merged_into_published_experts_and_quantized_again(tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    _, floats = publish(tmp_path / "published")
    lora = {
        "enable_lora": True,
        "lora_alpha": 64,
        "lora_target_modules": ["gate_up_proj", "down_proj"],
        "merge_lora_interval": 2,
    }
    layout = {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2, "lr": 0.02}
    codes = {**lora, "enable_qlora": True}
    made = {
        "codes": run_of(tmp_path, "codes", codes, **layout, expert_parallel_size=2),
        "floats": run_of(tmp_path, "floats", lora, **layout),
    }
    jobs = {name: runs.job_of(run, tmp_path / "packed") for name, run in made.items()}
    losses = {name: found[2] for name, found in on_ranks(2, each, steps, jobs)[0].items()}
    assert losses["codes"][:2] == pytest.approx(losses["floats"][:2], rel=1e-5)
    assert losses["codes"][2] == pytest.approx(losses["floats"][2], rel=0.02)
    merged = {}
    for name, run in made.items():
        out = tmp_path / name / "exported"
        saved = tmp_path / name / "checkpoints/global_step_3"
        write_folders(saved, resolve_model_source(run), ExportFormat(), out)
        merged[name] = load_file(out / "hf/model.safetensors")
    for name, begun in floats.items():
        change, wanted = (merged[kind][name].float() - begun.float() for kind in made)
        assert (change - wanted).norm() < 0.25 * wanted.norm()


def test_formats_are_known_without_the_weights_as_dry_runs_are():
    hf_config = {**runs.TINY, **GPT_OSS, "quantization_config": QUANTIZATION}
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    base = BaseModelWeights(names, QuantizationArgs(), hf_config, family.roles, None)
    experts = "model.layers.0.mlp.experts"
    assert dict(base.formats) == {
        f"{experts}.gate_up_proj": FORMATS["mxfp4"],
        f"{experts}.down_proj": FORMATS["mxfp4"],
    }
