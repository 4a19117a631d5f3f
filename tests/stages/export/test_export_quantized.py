"""Quantized exports, decoded by hand, and judged by compressed-tensors and transformers."""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, MixtralConfig, Qwen3Config

from penstock.core.errors import CapabilityError
from penstock.engine.hf.save_model import write_weights
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.quantization.export import quantizer_for
from penstock.models.registry import get_family
from penstock_kernels.quant import FORMATS, dequantize, get_format, largest, quantize
from tests.costs.measured import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, SMALL
from tests.ranks import on_ranks
from tests.stages.checkpoints import trained_artifact
from tests.stages.export.test_export import (
    ALPHA,
    export_of,
    loaded,
    logits,
    parameters_of,
    random_model,
    saved_config,
    saved_factors,
    with_adapter,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DENSE = Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True)
EXPERTS = MixtralConfig(**SIZES, head_dim=64, num_local_experts=2, tie_word_embeddings=False)
SCHEMES = ["fp8", "block_fp8", "int8", "int4", "nvfp4"]
LINEAR = re.compile(r"(.*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|w[123]))\.weight")

ONE_MATRIX = [["q_proj", "k_proj", "v_proj"], ["w1", "w3"]]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weights_of(config):
    """A random checkpoint of the model, by the names that its files have."""
    hf_config = config.to_dict()
    family = get_family(hf_config)
    generator = torch.Generator().manual_seed(1)
    shapes = family.weight_map(family.read(hf_config)).hf_shapes()
    return {
        name: torch.randn(shape, generator=generator) * (0.02 + 0.01 * (at % 3))
        for at, (name, shape) in enumerate(shapes.items())
    }


def exported(config, weights, folder, **settings):
    trained = trained_artifact(folder / "train", weights)
    stage = export_of(trained, saved_config(config, folder / "config"), **settings)
    return folder / "out/hf", stage.run(folder / "out")


def decoded(layer, tensors, scheme):
    """A layer's matrix as the format defines it, float32: no code of ours."""
    scale = tensors[f"{layer}.weight_scale"].float()
    if scheme in ("fp8", "int8"):
        return tensors[f"{layer}.weight"].float() * scale
    if scheme == "block_fp8":
        return tensors[f"{layer}.weight"].float() * torch.kron(scale, torch.ones(128, 128))
    packed = tensors[f"{layer}.weight_packed"]
    if scheme == "int4":
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        numbers = ((packed[..., None] >> shifts) & 15).flatten(-2) - 8
        assert numbers.shape == tuple(tensors[f"{layer}.weight_shape"])
        return numbers * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    numbers = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    whole = tensors[f"{layer}.weight_global_scale"]
    return numbers * (scale / whole).repeat_interleave(16, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_layer_is_the_quantized_one_and_what_is_no_layer_stays(scheme, tmp_path):
    weights = weights_of(EXPERTS)
    hf, facts = exported(EXPERTS, weights, tmp_path, quantise=scheme, dtype="bfloat16")
    tensors = load_file(hf / "model.safetensors")
    layers = {found[1] for name in weights if (found := LINEAR.fullmatch(name))}
    assert len(layers) == 4 + 2 * 3
    for layer in layers:
        weight = weights[f"{layer}.weight"]
        # Servers have one global scale for what they make one matrix of.
        above, _, last = layer.rpartition(".")
        alike = next((parts for parts in ONE_MATRIX if last in parts), [last])
        every = torch.cat([weights[f"{above}.{part}.weight"] for part in alike])
        most = largest(every, FORMATS["nvfp4"]) if scheme == "nvfp4" else None
        want = dequantize(quantize(weight, FORMATS[scheme], most), torch.float32)
        torch.testing.assert_close(
            decoded(layer, tensors, scheme), want, atol=0, rtol=2**-22 if scheme == "nvfp4" else 0
        )
        assert (want - weight).norm() < 0.13 * weight.norm()
    stays = {name for name in weights if not LINEAR.fullmatch(name)}
    assert {name for name in tensors if name.rpartition(".")[0] not in layers} == stays
    for name in stays:
        assert torch.equal(tensors[name], weights[name].bfloat16())
    said = json.loads((hf / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["lm_head", "model.layers.0.block_sparse_moe.gate"]
    assert facts["quantised"] == scheme
    card = (hf / "README.md").read_text()
    assert f"`{scheme}` in linear layers, bfloat16 elsewhere" in card
    assert "in transformers with `compressed-tensors` installed" in card
    # Again, in many files: the same tensors, and the index knows all of them.
    again, _ = exported(
        EXPERTS, weights, tmp_path / "2", quantise=scheme, dtype="bfloat16", max_shard_bytes=50_000
    )
    files = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 3
    assert set(files) == set(tensors)
    for name, file in files.items():
        assert torch.equal(load_file(again / file)[name].float(), tensors[name].float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_and_transformers_read_what_was_quantized(scheme, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = random_model(DENSE)
    weights = {name: tensor.detach() for name, tensor in parameters_of(model).items()}
    hf, _ = exported(DENSE, weights, tmp_path, quantise=scheme)
    tensors = load_file(hf / "model.safetensors")
    said = json.loads((hf / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(said)
    theirs = compressors.BaseCompressor.get_value_from_registry(config.format)
    layers = {found[1] for name in weights if (found := LINEAR.fullmatch(name))}
    for layer in layers:
        own = {
            name.removeprefix(f"{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{layer}.weight")
        }
        names = theirs.compression_param_names(config.config_groups["group_0"])
        assert set(own) == set(names)
        got = theirs.decompress(own, config.config_groups["group_0"])["weight"]
        want = decoded(layer, tensors, scheme)
        if scheme == "nvfp4":
            want = want.to(got.dtype)
        torch.testing.assert_close(got, want, atol=0, rtol=0)
        weights[f"{layer}.weight"].copy_(want)
    with torch.no_grad():
        want = logits(model)
    # The library decodes nvfp4 to bfloat16 alone. Activations are rounded too where config.json
    # says so: to three bits of e4m3.
    got = logits(loaded(hf, dtype=torch.bfloat16 if scheme == "nvfp4" else torch.float32))
    assert (got - want).norm() < {"fp8": 0.1, "block_fp8": 0.1}.get(scheme, 0.03) * want.norm()


def test_an_adapter_is_merged_before_and_lies_beside_as_it_was(tmp_path):
    factors = saved_factors(with_adapter(random_model(DENSE)))
    trained = trained_artifact(tmp_path / "train", factors, adapter_only=True)
    path = saved_config(DENSE, tmp_path / "config")
    export_of(trained, path, alpha=ALPHA).run(tmp_path / "as it is")
    export_of(trained, path, alpha=ALPHA, quantise="nvfp4").run(tmp_path / "rounded")
    merged = load_file(tmp_path / "as it is/hf/model.safetensors")
    tensors = load_file(tmp_path / "rounded/hf/model.safetensors")
    qkv = {part: f"model.layers.0.self_attn.{part}_proj" for part in "qkv"}
    most = largest(torch.cat([merged[f"{each}.weight"] for each in qkv.values()]), FORMATS["nvfp4"])
    for layer in qkv.values():
        want = dequantize(
            quantize(merged[f"{layer}.weight"], FORMATS["nvfp4"], most), torch.float32
        )
        got = decoded(layer, tensors, "nvfp4")
        torch.testing.assert_close(got, want, atol=0, rtol=2**-22)
    for name in ("adapter/adapter_model.safetensors", "base/config.json", "base/model.safetensors"):
        assert (tmp_path / "rounded" / name).read_bytes() == (
            tmp_path / "as it is" / name
        ).read_bytes()


def test_what_the_format_does_not_hold_is_refused(tmp_path):
    config = GptOssConfig(**SIZES, head_dim=64, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(CapabilityError, match="gpt_oss keeps all experts of a layer in one tensor"):
        exported(config, {"any": torch.zeros(1)}, tmp_path / "one tensor", quantise="fp8")
    weights = weights_of(DENSE)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
    with pytest.raises(CapabilityError, match=r"up_proj\.weight: .*finite(.|\n)*earlier checkp"):
        exported(DENSE, weights, tmp_path / "infinite", quantise="int4")


def test_layers_take_the_widest_groups_they_have_room_for_or_are_refused(tmp_path):
    def of(width, scheme):
        sizes = {**SIZES, "intermediate_size": width}
        config = Qwen3Config(**sizes, head_dim=64, tie_word_embeddings=True)
        weights = weights_of(config)
        hf, _ = exported(config, weights, tmp_path / f"{width}{scheme}", quantise=scheme)
        return hf, weights

    hf, weights = of(160, "int4")
    said = json.loads((hf / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == 32
    tensors = load_file(hf / "model.safetensors")
    down = "model.layers.0.mlp.down_proj"
    want = dequantize(quantize(weights[f"{down}.weight"], get_format("int4", 32)), torch.float32)
    assert torch.equal(decoded(down, tensors, "int4"), want)
    for width, scheme, asks in (
        (
            136,
            "int4",
            r"down_proj.* 128 x 136, and int4 needs columns in multiples of 32",
        ),
        (160, "block_fp8", r"gate_proj.weight is 160 x 128, and .* multiples of 128 x 128"),
        (136, "nvfp4", r"down_proj.weight is 128 x 136, and nvfp4 .* multiples of 16"),
    ):
        with pytest.raises(CapabilityError, match=asks):
            of(width, scheme)


WIDTH = 1536
"""Such that layers are large beside what a process needs anyway."""


def status(name):
    """Bytes that the system counts of this process."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) * 1024


def write(width, scheme, out):
    """Two layers of constants, written as an export writes them."""
    hf_config = Qwen3Config(
        vocab_size=300,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=width // 8,
    ).to_dict()
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    shapes = names.hf_shapes()

    def read(wanted):
        return {name: torch.full(shapes[name], 0.01, dtype=torch.bfloat16) for name in wanted}

    quantizer = None if scheme == "none" else quantizer_for(scheme, family, names)
    dtype = torch.float32 if quantizer is None else torch.bfloat16
    weights = HFStateDict(shapes, read)
    write_weights(weights, out, dtype=dtype, max_shard_size="5GB", quantizer=quantizer)


def most_to_write(width, scheme, folder):
    """Bytes that writing takes beyond what this process has."""
    libc = ctypes.CDLL(None)
    # What is freed goes back to the system at once.
    libc.mallopt(M_MMAP_THRESHOLD, SMALL)
    libc.mallopt(M_TRIM_THRESHOLD, SMALL)
    write(256, scheme, folder / "small")
    gc.collect()
    libc.malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    write(width, scheme, folder / "large")
    return status("VmHWM") - before


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("scheme", ["none", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_writing_takes_no_more_memory_than_two_layers(scheme, tmp_path):
    [most] = on_ranks(1, most_to_write, WIDTH, scheme, tmp_path)
    layer = (4 + 3 * 3) * WIDTH * WIDTH * 2
    assert most < 2 * layer, most / layer
