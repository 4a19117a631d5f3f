"""Every prequantized format trains, resumes and merges: over adapters with its codes, over adapters
with dequantized weights, and as a whole.

The judges are the same run over the dequantized weights, and PEFT's adapter on these.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.core.errors import CapabilityError
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.engine.quantization import compressed_tensors
from penstock.estimate.machine import check_model, check_weights
from penstock.pipeline.origins import resolve_model_source
from penstock_kernels.quant import dequantize, get_format, quantize
from tests.engine import runs
from tests.engine.loops import loop_of, parameters_of, save, step
from tests.engine.peft.test_prequantized import LAYER, NAME, NF4_SAID, nf4_tensors, nvfp4_tensors

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
Published = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix by the ends of their names after the layer's, and what they stand for."""


def of_scheme(scheme: Any, weight: torch.Tensor) -> Published:
    kept = compressed_tensors.format_for(scheme, {"weight": tuple(weight.shape)})
    made = quantize(weight, kept)
    tensors = compressed_tensors.of_rows("", made)
    tensors |= compressed_tensors.of_whole("", tuple(weight.shape), made)
    return tensors, dequantize(made, torch.float32)


def scheme_config(scheme: Any) -> dict[str, Any]:
    kept = get_format("int4", 128) if scheme == "int4" else get_format(scheme, None)
    return compressed_tensors.quantization_config(scheme, kept, ["lm_head"])


def of_tensors(published: Published) -> Published:
    tensors, wanted = published
    ends = {name.removeprefix(LAYER): one for name, one in tensors.items()}
    return {end: one for end, one in ends.items() if end.startswith((".", "_"))}, wanted


def nf4_of_floats(weight: torch.Tensor) -> Published:
    """bitsandbytes' tensors with scales that are floats."""
    made = quantize(weight, get_format("nf4", 64))
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    low, high = made.codes & 15, made.codes >> 4
    return {
        # The first of two codes is in the high bits.
        ".weight": (low << 4 | high).reshape(-1, 1),
        ".weight.absmax": made.scales.flatten(),
        ".weight.quant_map": torch.tensor(made.format.levels),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }, dequantize(made, torch.float32)


def nf4_nested(weight: torch.Tensor) -> Published:
    tensors, wanted = of_tensors(nf4_tensors(*weight.shape))
    # Scales of about those of a layer.
    state = json.loads(tensors[end := ".weight.quant_state.bitsandbytes__nf4"].numpy().tobytes())
    state["nested_offset"] *= 0.05
    tensors[".weight.nested_absmax"] *= 0.05
    tensors[end] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, wanted * 0.05


def tiles(weight: torch.Tensor) -> Published:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(rows, columns) * 1e-4 + 1e-4
    codes = (weight * 2000).to(torch.float8_e4m3fn)
    grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = codes.float() * grid[: weight.shape[0], : weight.shape[1]]
    return {".weight": codes, ".weight_scale_inv": scales}, wanted


def one_scale(weight: torch.Tensor) -> Published:
    codes = (weight * 2000).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0005)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


KINDS: dict[str, Any] = {
    **{
        f"compressed-tensors {scheme}": (
            scheme_config(scheme),
            lambda weight, scheme=scheme: of_scheme(scheme, weight),
        )
        for scheme in compressed_tensors.SCHEMES
    },
    "bitsandbytes nf4": (NF4_SAID, nf4_of_floats),
    "bitsandbytes nf4, nested": (NF4_SAID, nf4_nested),
    "fp8 in tiles": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, tiles),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, one_scale),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: of_tensors(nvfp4_tensors(weight)),
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "qlora": {"enable_lora": True, "enable_qlora": True, "lora_rank": 4},
    "lora": {"enable_lora": True, "lora_rank": 4},
    "full": {},
}
CASES = list(itertools.product(KINDS, MODES))
DRAWN = {("bitsandbytes nf4", "qlora"), ("bitsandbytes nf4", "full"), ("modelopt nvfp4", "lora")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and a model of unquantized weights."""
    at = tmp_path_factory.mktemp("prequantized")
    runs.write_rows(at / "packed", 12)
    runs.write_model(at / "plain", **SIZES)
    return at


def publish(folder: Path, kind: str) -> None:
    """Write the model quantized and, for a judge, what its tensors stand for."""
    config, made_of = KINDS[kind]
    stored, plain = {}, load_file(folder / "plain/model.safetensors")
    for name in [name for name in plain if "_proj." in name]:
        tensors, wanted = made_of(plain[name])
        layer = name.removesuffix(".weight")
        stored |= {layer + end: tensor.contiguous() for end, tensor in tensors.items()}
        plain[name] = wanted.contiguous()
    written = json.loads((folder / "plain/config.json").read_text())
    others = {name: tensor for name, tensor in plain.items() if "_proj." not in name}
    for to, tensors, values in (
        ("quantized", {**others, **stored}, {**written, "quantization_config": config}),
        ("judge", plain, written),
    ):
        (folder / kind / to).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / kind / to / "model.safetensors", {"format": "pt"})
        (folder / kind / to / "config.json").write_text(json.dumps(values))


def job_of(folder: Path, kind: str, base: str, mode: str, out: str) -> Any:
    lora = dict(MODES[mode])
    if base == "judge":
        lora.pop("enable_qlora", None)
    at = folder / kind / base
    run = runs.run_config(
        folder / kind / out,
        at,
        model={"model_path": str(at), "tokenizer_path": "builtin:bytes"},
        lora=lora,
        data_parallel_mode="none",
    )
    check_weights(run)
    assert all("input_scale" in note for note in check_model(run))
    return runs.job_of(run, folder / "packed")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(
            *case, marks=() if case in DRAWN else pytest.mark.exhaustive, id="-".join(case)
        )
        for case in CASES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_run_over_codes_is_the_run_over_what_they_stand_for(
    kind: str, mode: str, folder: Path
) -> None:
    publish(folder, kind)
    job = job_of(folder, kind, "quantized", mode, f"{mode}, out")
    loop = loop_of(job)
    losses = [step(loop)["loss"]]
    save(loop)
    losses.append(step(loop)["loss"])
    again = loop_of(job)
    again._resume()
    assert again.at.step == 1
    assert step(again)["loss"] == losses[1]
    resumed, ended = parameters_of(again), parameters_of(loop)
    assert resumed.keys() == ended.keys()
    assert all(np.array_equal(resumed[name], value) for name, value in ended.items())

    judged = loop_of(job_of(folder, kind, "judge", mode, f"{mode}, judge"))
    assert losses == pytest.approx([step(judged)["loss"] for _ in range(2)], rel=2e-6)

    save(again)
    last = job.output_dir / "checkpoints/global_step_2"
    out = folder / kind / f"{mode}, exported"
    write_folders(last, resolve_model_source(job.config), ExportFormat(verify="logits"), out)
    ids = torch.arange(40)[None] * 7 % runs.VOCAB
    merged = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    logits = merged.eval()(ids).logits
    if mode == "full":
        assert not merged.config.to_dict().get("quantization_config")
        return
    base = AutoModelForCausalLM.from_pretrained(folder / kind / "judge", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(out / "adapter")).eval()
    # The export has the dtype of quantized models.
    torch.testing.assert_close(logits, adapted(ids).logits, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        *({"quant_method": name, "bits": 4} for name in ("gptq", "awq", "hqq", "torchao", "aqlm")),
    ],
    ids=lambda said: said["quant_method"],
)
@pytest.mark.parametrize("mode", MODES)
def test_formats_that_are_not_read_are_refused_before_work(
    said: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    runs.write_config(tmp_path / "model", quantization_config=said)
    model = {"model_path": str(tmp_path / "model")}
    run = runs.run_config(tmp_path / "out", tmp_path / "model", model=model, lora=MODES[mode])
    with pytest.raises(CapabilityError, match=r"(?s)quantization_config .*model\.model_path"):
        check_weights(run)


def test_every_format_that_is_read_has_a_run() -> None:
    from penstock.models.quantization_config import STORED

    # gpt-oss, in tests/engine/peft/test_mxfp4.py.
    methods = {config["quant_method"] for config, _ in KINDS.values()} | {"mxfp4"}
    assert methods == set(STORED)
    assert NAME.startswith(LAYER)
