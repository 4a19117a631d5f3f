"""Checkpoints that others quantized, judged by the libraries that make and read them.

Where a library is absent its published definition stands in the test, in plain torch.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations import finegrained_fp8 as fp8

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization import compressed_tensors
from penstock.engine.quantization.bitsandbytes_nf4 import STATE
from penstock.engine.quantization.prequantized import published_in
from penstock.engine.quantization.validate_settings import validate_prequantized
from penstock.models.quantization_config import MODELOPT, parse_quantization_config
from penstock_kernels.quant import FORMATS, dequantize, quantize
from penstock_kernels.quant.formats import NF4

NAME = "model.layers.0.mlp.up_proj.weight"
LAYER = NAME.removesuffix(".weight")
PLAIN = "model.layers.0.mlp.gate.weight"

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of sizes that differ from row to row and column to column."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 0.02
    return drawn * torch.linspace(0.1, 3, shape[0])[:, None] * torch.linspace(2, 1, shape[1])


def folder_of(at: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, at / "model.safetensors"
    )
    return at


def read_back(at: Path, said: dict[str, Any], wanted: torch.Tensor, **tolerance: float):
    """A folder's matrix equals `wanted`; so does any run of its rows, from their own bytes."""
    published = published_in({"quantization_config": said}, at)
    assert published is not None
    rows = len(wanted)
    with SafetensorsFolder(at) as folder:
        assert published.reader.is_quantized(folder, NAME)
        assert not published.reader.is_quantized(folder, PLAIN)
        assert published.reader.shape(folder, NAME) == wanted.shape
        whole = published.reader.rows(folder, NAME, 0, rows)
        torch.testing.assert_close(
            dequantize(whole, torch.float32), wanted, **{"rtol": 0, "atol": 0, **tolerance}
        )
        read: list[int] = []
        init_adapters = folder._fill

        def counted(descriptor, into, offset, name):
            read.append(len(into))
            init_adapters(descriptor, into, offset, name)

        folder._fill = counted
        for first, end in ((0, 1), (1, 7), (rows // 2 - 3, rows // 2 + 3), (rows - 1, rows)):
            part, cut = (
                published.reader.rows(folder, NAME, first, end),
                whole.narrow(-2, first, end - first),
            )
            for name, tensor in part.as_bytes().items():
                assert torch.equal(tensor, cut.as_bytes()[name])
        # Far less than the whole each time.
        assert sum(read) < whole.num_bytes
    return published, whole


# FP8 in tiles.


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_fp8_in_tiles_is_what_transformers_makes_of_it(scales, tmp_path):
    weight = numbers(384, 256)
    quantizer: Any = type("", (), {})()
    quantizer.quantization_config = type(
        "", (), {"weight_block_size": (128, 128), "scale_fmt": "float"}
    )()
    maker: Any = fp8.Fp8Quantize(quantizer)
    made, scale_name = maker.convert({NAME: weight}), f"{NAME}_scale_inv"
    made[scale_name] = made[scale_name].to(scales)
    stored = {"weight": made[NAME], "weight_scale_inv": made[scale_name].float()}
    theirs = maker.reverse_op.convert(stored)["weight"]
    said = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    published, whole = read_back(
        folder_of(tmp_path, {**made, PLAIN: weight[:8].bfloat16()}), said, theirs
    )
    assert torch.equal(whole.codes.view(torch.float8_e4m3fn).float(), made[NAME].float())
    assert (published.format.name, published.declared.ignored_modules) == (
        "block_fp8",
        ("lm_head",),
    )


def test_tiles_at_the_edges_and_one_scale_for_a_matrix_are_read(tmp_path):
    weight = numbers(200, 300)
    codes, tiles = (weight * 2000).to(torch.float8_e4m3fn), torch.rand(2, 3)
    grid = tiles.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    tensors = {NAME: codes, f"{NAME}_scale_inv": tiles, PLAIN: weight[:8]}
    at = folder_of(tmp_path, tensors)
    read_back(at, {"quant_method": "fp8", "weight_block_size": [128, 128]}, codes.float() * grid)
    for scale in (torch.tensor(0.3), torch.tensor([0.3]), torch.full((200, 1), 0.3)):
        tensors[f"{NAME}_scale_inv"] = scale
        said = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
        published, _ = read_back(folder_of(tmp_path, tensors), said, codes.float() * scale)
        assert published.format.name == "fp8"


# ModelOpt.


def nvfp4_tensors(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """ModelOpt's tensors, and what they stand for."""
    whole = weight.abs().max() / (6 * 448)
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    each = (scales.float() * whole).repeat_interleave(16, 1)
    codes = ((weight / each)[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    tensors = {
        NAME: codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{NAME}_scale": scales,
        f"{NAME}_scale_2": whole,
        f"{LAYER}.input_scale": torch.tensor(0.01),
        PLAIN: weight[:8].bfloat16(),
    }
    return tensors, E2M1[codes.long()] * each


def test_nvfp4_of_modelopt_is_read_whichever_file_declares_it(tmp_path):
    weight = numbers(96, 64)
    tensors, wanted = nvfp4_tensors(weight)
    at = folder_of(tmp_path, tensors)
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    published, whole = read_back(at, said, wanted, rtol=2**-22)
    assert published.declared.ignored_modules == ("lm_head",)
    assert torch.equal(whole.codes, tensors[NAME])
    assert (wanted - weight).norm() < 0.13 * weight.norm()
    old = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*.mlp.gate"]}
    (at / MODELOPT).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": old}))
    found = published_in({}, at)
    assert found is not None
    assert (found.format.name, found.declared.ignored_modules) == ("nvfp4", ("*.mlp.gate",))
    (at / MODELOPT).write_text(json.dumps({"quantization": {"quant_algo": None}}))
    with pytest.raises(CapabilityError, match=r"quant_algo None of ModelOpt; NVFP4 and FP8"):
        published_in({}, at)


def test_fp8_of_modelopt_has_one_scale_for_a_matrix(tmp_path):
    codes = (numbers(40, 50) * 2000).to(torch.float8_e4m3fn)
    tensors = {NAME: codes, f"{NAME}_scale": torch.tensor(0.3), PLAIN: numbers(8, 50)}
    said = {"quant_method": "modelopt", "quant_algo": "FP8"}
    read_back(folder_of(tmp_path, tensors), said, codes.float() * 0.3)


# bitsandbytes.


@pytest.mark.parametrize("scales", ["floats", "quantized again"])
def test_nf4_is_what_bitsandbytes_makes_of_it(scales, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    # Groups of 256 scales begin within rows.
    for group, shape in ((64, (150, 192)), (128, (60, 256))):
        weight = numbers(*shape)
        packed, state = functional.quantize_4bit(
            weight, blocksize=group, quant_type="nf4", compress_statistics=scales != "floats"
        )
        tensors = {f"{NAME}.{name}": one for name, one in state.as_dict(packed=True).items()}
        theirs = functional.dequantize_4bit(packed, state)
        said = {**NF4_SAID, "llm_int8_skip_modules": ["lm_head"]}
        for stored in (torch.uint8, torch.bfloat16):
            tensors |= {NAME: packed.flatten().view(stored)[:, None], PLAIN: weight[:8]}
            at = folder_of(tmp_path, tensors)
            published, _ = read_back(at, said, theirs)
            assert published.declared.group_size == published.format.group == group
            assert published.declared.ignored_modules == ("lm_head",)


def nf4_tensors(rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """bitsandbytes' tensors with scales that are quantized again, and what they stand for."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(16, (rows * columns,), generator=generator)
    groups = rows * columns // 64
    scales = torch.randint(256, (groups,), generator=generator)
    of_scales = torch.rand(-(-groups // 256), generator=generator)
    scale_levels = torch.linspace(-1, 1, 256)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [rows, columns],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 1.5,
    }
    tensors = {
        # The first of two codes is in the high bits.
        NAME: (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"{NAME}.absmax": scales.to(torch.uint8),
        f"{NAME}.quant_map": torch.tensor(NF4),
        f"{NAME}.nested_absmax": of_scales,
        f"{NAME}.nested_quant_map": scale_levels,
        f"{NAME}{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        PLAIN: numbers(8, columns),
    }
    each = scale_levels[scales] * of_scales.repeat_interleave(256)[:groups] + 1.5
    return tensors, torch.tensor(NF4)[codes].view(rows, columns) * each.repeat_interleave(64).view(
        rows, columns
    )


NF4_SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_nf4_with_scales_that_are_quantized_again_is_read_from_any_row_on(tmp_path):
    tensors, wanted = nf4_tensors(150, 192)
    read_back(folder_of(tmp_path, tensors), NF4_SAID, wanted)


# compressed-tensors.


@pytest.mark.parametrize("scheme", compressed_tensors.SCHEMES)
def test_what_is_exported_is_read_back_bit_for_bit(scheme, tmp_path):
    weight = numbers(256, 256)
    made = quantize(weight, FORMATS[scheme])
    kinds = compressed_tensors.stored_tensors(LAYER, (256, 256), FORMATS[scheme])
    tensors = compressed_tensors.of_rows(LAYER, made)
    tensors |= compressed_tensors.of_whole(LAYER, (256, 256), made)
    assert set(kinds) == set(tensors)
    at = folder_of(tmp_path, {**tensors, PLAIN: weight[:8].bfloat16()})
    said = compressed_tensors.quantization_config(scheme, FORMATS[scheme], ["lm_head"])
    # The scale of a matrix is published as what to divide by.
    rounding = {"rtol": 2**-22} if scheme == "nvfp4" else {}
    published, read = read_back(at, said, dequantize(made, torch.float32), **rounding)
    assert (published.format, published.declared.ignored_modules) == (FORMATS[scheme], ("lm_head",))
    assert torch.equal(read.codes, made.codes)
    assert torch.equal(read.scales.float(), made.scales.float())


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "tensor"}),
        ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "tensor"}),
        ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}),
        ("pack-quantized", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}),
    ],
    ids=lambda value: f"{value['type']} {value['strategy']}" if isinstance(value, dict) else "",
)
def test_matrices_are_what_compressed_tensors_makes_of_them(layout, weights, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = numbers(96, 64)
    groups = {"tensor": weight.view(1, 1, -1), "channel": weight[:, None]}.get(
        weights["strategy"], weight.unflatten(1, (-1, 32))
    )
    most = {"float": 448, "int": 2.0 ** (weights["num_bits"] - 1) - 0.5}[weights["type"]]
    # As most of those that are published have them.
    scales = (groups.abs().amax(-1) / most).bfloat16()
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    theirs = compressors.BaseCompressor.get_value_from_registry(layout)
    stored = theirs.compress({"weight": weight, "weight_scale": scales.float()}, scheme)
    wanted = theirs.decompress(dict(stored), scheme)["weight"]
    stored["weight_scale"] = scales.view(1) if scales.numel() == 1 else scales
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in stored.items()}
    at = folder_of(tmp_path, {**tensors, PLAIN: weight[:8].bfloat16()})
    said = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }
    published, _ = read_back(at, said, wanted.float())
    assert published.format.group == weights.get("group_size")


# What is not read.


def broken_nf4(change: dict[str, Any], drop: str = "") -> dict[str, torch.Tensor]:
    tensors, _ = nf4_tensors(8, 64)
    state = {**json.loads(bytes(tensors[f"{NAME}{STATE}"].tolist())), **change}
    tensors[f"{NAME}{STATE}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {name: tensor for name, tensor in tensors.items() if name != drop}


TILES = {NAME: torch.zeros(200, 128, dtype=torch.float8_e4m3fn)}
FP8_SAID = {"quant_method": "fp8"}
NVFP4 = nvfp4_tensors(numbers(8, 32))[0]
NVFP4_SAID = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
INT8 = {NAME: torch.zeros(8, 4, dtype=torch.int8), f"{NAME}_scale": torch.ones(8, 1)}
INT8_SAID = compressed_tensors.quantization_config("int8", FORMATS["int8"], [])


@pytest.mark.parametrize(
    ("said", "tensors", "fault"),
    [
        (FP8_SAID, TILES, "weight_scale_inv .* it is not there"),
        (
            FP8_SAID,
            {**TILES, f"{NAME}_scale_inv": torch.ones(1, 1)},
            r"it is torch.float32 \(1, 1\), and would be .* \(2, 1\)",
        ),
        (
            FP8_SAID,
            {NAME: torch.zeros(128, 128, dtype=torch.float8_e5m2)},
            "it is torch.float8_e5m2 .* and block_fp8 is torch.float8_e4m3fn",
        ),
        (NVFP4_SAID, {**NVFP4, f"{NAME}_scale_2": torch.ones(2)}, "it is not one number"),
        (NVFP4_SAID, {**NVFP4, NAME: NVFP4[NAME][:, :3].clone()}, "6 columns .* groups of 16"),
        (INT8_SAID, {**INT8, f"{NAME}_zero_point": torch.ones(8, 1)}, "it is not zero"),
        (INT8_SAID, {**INT8, f"{NAME}_g_idx": torch.arange(4)}, "in another order"),
        (NF4_SAID, broken_nf4({}, f"{NAME}.nested_quant_map"), "quant_map .* it is not there"),
        (NF4_SAID, broken_nf4({"shape": [8]}), "it says .*shape"),
        (NF4_SAID, broken_nf4({}, f"{NAME}.nested_absmax"), "it says .*nested_blocksize"),
        (NF4_SAID, broken_nf4({"shape": [16, 64]}), "would be 512 of torch.uint8"),
        (NF4_SAID, broken_nf4({"shape": [16, 32]}), "groups of 64 do not end where its rows of 32"),
        (
            NF4_SAID,
            {**broken_nf4({}), f"{NAME}{STATE}": torch.zeros(3, dtype=torch.uint8)},
            "it is not JSON",
        ),
        (
            NF4_SAID,
            {**broken_nf4({}), f"{NAME}.quant_map": torch.linspace(-1, 1, 16)},
            "levels are not those of NF4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_are_not_as_declared_are_refused(said, tensors, fault, tmp_path):
    folder_of(tmp_path, tensors)
    # Without the folder: another matrix may be the one that groups are known by.
    published = published_in({"quantization_config": said})
    assert published is not None
    with SafetensorsFolder(tmp_path) as folder:
        assert published.reader.is_quantized(folder, NAME)
        with pytest.raises(CapabilityError, match=f"(?s){fault}.*Name the model"):
            published.reader.rows(folder, NAME, 0, 1)


def test_groups_that_a_format_does_not_have_are_refused():
    said = compressed_tensors.quantization_config("int4", FORMATS["int4"], [])
    said["config_groups"]["group_0"]["weights"]["group_size"] = 40
    with pytest.raises(CapabilityError, match=r"(?s)int4 cannot have groups of 40.*Name the model"):
        published_in({"quantization_config": said})


def test_settings_agree_with_what_is_published():
    nf4, int8, tiles = (
        parse_quantization_config({"quantization_config": said})
        for said in (NF4_SAID, INT8_SAID, FP8_SAID)
    )
    assert nf4 is not None
    assert int8 is not None
    assert tiles is not None
    for declared in (nf4, int8, tiles):
        validate_prequantized(QuantizationArgs(), declared)
        validate_prequantized(
            QuantizationArgs(declared.format, declared.group_size, ("q_proj",)), declared
        )
    # Without QLoRA they are dequantized.
    validate_prequantized(None, nf4)
    # Its groups are said with each matrix, and compared once they are known.
    validate_prequantized(QuantizationArgs(group=128), nf4)
    for quantizing, declared, fault in (
        (QuantizationArgs("nvfp4"), tiles, r"quant_format is nvfp4, and .* in block_fp8 \(fp8\)"),
        (
            QuantizationArgs(group=64),
            tiles,
            "quant_group_size is 64, .* groups of 128.*Leave quant_group",
        ),
        (QuantizationArgs(group=16), int8, "quant_group_size is 16, .* a scale for each row"),
        (
            QuantizationArgs(group=128),
            replace(nf4, group_size=64),
            "quant_group_size is 128, .* groups of 64",
        ),
    ):
        with pytest.raises(ConfigError, match=f"(?s){fault}"):
            validate_prequantized(quantizing, declared)
