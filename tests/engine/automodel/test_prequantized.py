"""Checkpoints that are published quantized, trained through transformers' own code. The judge is
the same run over the floats that the codes stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import CapabilityError
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import in_source
from penstock.engine.hf.unused_tensors import describe_unused
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization.bitsandbytes_nf4 import STATE
from penstock.models.automodel.family import auto_family
from penstock.models.registry import get_family
from penstock.rows.reader import PackedRows
from penstock_kernels.quant import get_format
from tests.engine import loops
from tests.engine.automodel import examine, tiny_models
from tests.engine.traces import loss_of_transformers
from tests.ranks import on_ranks

GROUP = 16
NARROW = "q_b_proj"
"""Its rows are not whole groups."""
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def publish(folder: Path, published: Path, floats: Path) -> None:
    """Write the model in `folder` with the matrices of its layers in bitsandbytes' NF4, and with
    the floats that they stand for."""
    config = json.loads((folder / "config.json").read_text())
    quantized: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() == 2 and ".layers." in name and NARROW not in name:
            components, plain[name] = nf4(weight)
            quantized |= {f"{name}{part}": tensor for part, tensor in components.items()}
        else:
            quantized[name] = plain[name] = weight
    for out, tensors, more in ((published, quantized, NF4), (floats, plain, None)):
        out.mkdir()
        save_file(tensors, out / "model.safetensors")
        values = config | ({"quantization_config": more} if more else {})
        (out / "config.json").write_text(json.dumps(values))


def nf4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix by what is added to its name, and the matrix that they stand for."""
    levels = torch.tensor(get_format("nf4").levels)
    groups = weight.reshape(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True)
    codes = (groups[..., None] / scales[..., None] - levels).abs().argmin(-1)
    state = {"quant_type": "nf4", "blocksize": GROUP, "shape": [*weight.shape]}
    flat = codes.flatten()
    components = {
        "": (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)[:, None],
        ".absmax": scales.flatten(),
        ".quant_map": levels,
        STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return components, (levels[codes] * scales).view(weight.shape)


def _losses(published: Path, floats: Path) -> tuple[list[float], list[float], int]:
    found: list[list[float]] = []
    codes = 0
    # A name that no layer has is refused.
    has_narrow = any(NARROW in name for name in load_file(floats / "model.safetensors"))
    for folder, adapters in (
        (published, {"enable_qlora": True, "exclude_modules": [NARROW] if has_narrow else []}),
        (floats, {}),
    ):
        job = examine.job_of(folder, "lora", adapters={"lora_alpha": 32, **adapters})
        loop = loops.loop_of(job)
        found.append([loops.step(loop)["loss"] for _ in range(3)])
        codes += sum(name.endswith(".codes") for name in loops.parameters_of(loop))
    return found[0], found[1], codes


# Experts that are stored one by one; a name that the class has changed.
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", pytest.param("falcon_h1", marks=pytest.mark.exhaustive)]
)
def test_adapters_learn_beside_published_codes_as_beside_the_floats_they_stand_for(
    tmp_path, model_type
):
    examine.write_rows(tmp_path)
    own, published, floats = (tmp_path / name for name in ("own", "published", "floats"))
    tiny_models.write_model(own, model_type)
    publish(own, published, floats)
    (ours, wanted, codes), _ = on_ranks(2, _losses, published, floats)
    assert ours == pytest.approx(wanted, rel=1e-5)
    assert ours[-1] < ours[0]
    assert codes > 4
    rows = PackedRows(tmp_path / "packed" / "data" / "train")
    with torch.no_grad():
        theirs = loss_of_transformers(examine._load(floats), rows, [0, 1, 2, 3])
    assert ours[0] == pytest.approx(theirs.item(), rel=1e-4)


def test_every_tensor_is_that_of_the_floats_and_codes_are_read_as_they_are(tmp_path):
    own, published, floats = (tmp_path / name for name in ("own", "published", "floats"))
    tiny_models.write_model(own, "deepseek_v3")
    publish(own, published, floats)
    read: dict[str, dict[str, torch.Tensor]] = {}
    for folder in (published, floats):
        hf_config = json.loads((folder / "config.json").read_text())
        family = auto_family(hf_config)
        names = family.weight_map(family.read(hf_config))
        for quantizing in (
            (None, QuantizationArgs(excluded=(NARROW,))) if folder is published else (None,)
        ):
            base = BaseModelWeights(names, quantizing, hf_config, family.roles, folder)
            with SafetensorsFolder(folder) as files:
                reader = base.quantized_reader(files)
                weights = in_source(reader, names)
                read[f"{folder.name} {quantizing is not None}"] = weights.read(list(weights.shapes))
                matrix = next((name for name in base.formats if "down_proj" in name), "")
                if matrix:
                    shape = reader.stored(f"{matrix}.codes").shape
                    codes = reader.box(f"{matrix}.codes", (0, 0), shape)
                    stored = files[matrix].flatten()
                    # Here the first of two codes is in the low bits.
                    assert torch.equal(codes.flatten(), (stored >> 4) | (stored << 4))
        assert describe_unused(folder, hf_config, names) is None
    wanted = read["floats False"]
    for kind in ("published False", "published True"):
        assert read[kind].keys() == wanted.keys()
        assert all(torch.equal(read[kind][name].float(), wanted[name]) for name in wanted), kind


def test_stacks_in_mxfp4_are_refused(tmp_path):
    tiny_models.write_model(tmp_path / "own", "gpt_oss")
    values = json.loads((tmp_path / "own" / "config.json").read_text())
    declared = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(CapabilityError, match="published in mxfp4"):
        get_family(values | declared, "transformers")
