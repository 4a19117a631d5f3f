"""Quantized matrices, ours and bitsandbytes' and torchao's: `python -m
tests.bench.kernels.bench_quant [--dry]`.

Medians of five, in turns, after one warm run each; peers that are not installed are named. On a
GPU: quantizing and dequantizing against copying as many bytes (goal: at least 0.85 of its speed for
dequantizing), noise on the weights against dequantizing them, the product of few rows against
dequantizing first (what `matmul` chooses by rows is right while the first is faster up to 64), and
a layer's forward and backward pass of 8192 tokens against one whose weight is bfloat16 (goal: at
least 0.9 of its speed). On a CPU: quantizing, dequantizing and noise by the references, which is
what runs there.
"""

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from tests.bench.timing import CUDA, DEVICE, Work, copying, machine, medians, show

from penstock_kernels.noise import RowKeys, add_noise_
from penstock_kernels.quant import FORMATS, QuantizedTensor, dequantize, linear, matmul, quantize

TOKENS = 8192
SHAPE = (14336, 8192) if CUDA else (2048, 4096)
DRY = (64, 256)
MATMUL_ROWS = (1, 8, 16, 64)


def peers(name: str, weight: torch.Tensor) -> dict[str, tuple[Work, Work]]:
    """Who else quantizes to this format, and the way back, by name."""
    found: dict[str, tuple[Work, Work]] = {}
    if name == "nf4" and find_spec("bitsandbytes"):
        bnb = import_module("bitsandbytes.functional")
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        found["bitsandbytes"] = (
            lambda: bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4"),
            lambda: bnb.dequantize_4bit(packed, state),
        )
    if name == "nvfp4" and find_spec("torchao"):
        ao = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

        def make() -> Any:
            return ao.NVFP4Tensor.to_nvfp4(
                weight, per_tensor_scale=ao.per_tensor_amax_to_scale(weight.abs().max().float())
            )

        made = make()
        found["torchao"] = make, lambda: made.dequantize(torch.bfloat16)
    return found


def compare_conversions(name: str, weight: torch.Tensor) -> QuantizedTensor:
    """Print both ways, ours and the peers'."""
    made = quantize(weight, FORMATS[name])
    num_bytes = made.num_bytes + weight.numel() * weight.element_size()
    ours: tuple[Work, Work] = (lambda: quantize(weight, FORMATS[name]), lambda: dequantize(made))
    others = peers(name, weight)
    for at, what in enumerate(("quantize", "dequantize")):
        works = {"ours": ours[at], "copy": copying(num_bytes)}
        works |= {who: work[at] for who, work in others.items()}
        found = medians(works)
        show(f"{name} {what}", found, "copy", num_bytes)
        for who in others:
            show(f"{name} {what}", {"ours": found["ours"], who: found[who]}, who)
    return made


def compare_noise(name: str, made: QuantizedTensor) -> None:
    """Print noise on a matrix, and dequantizing it."""
    weight, runs = dequantize(made), [RowKeys(made.shape[0], 1)]
    found = medians(
        {
            "ours": lambda: add_noise_(weight, made, 1.0, runs),
            "dequantize": lambda: dequantize(made),
        }
    )
    show(f"{name} noise", found, "dequantize", made.num_bytes + 4 * weight.numel())


def compare_products(name: str, made: QuantizedTensor) -> None:
    """Print products of few rows, both ways."""
    fused = matmul.backend("triton")
    for rows in MATMUL_ROWS:
        x = torch.randn(rows, made.columns, device=DEVICE, dtype=torch.bfloat16)
        found = medians(
            {
                "ours": lambda x=x: fused(x, made),
                "dequantized first": lambda x=x: matmul.reference(x, made),
            }
        )
        show(f"{name} times {rows} rows", found, "dequantized first", made.num_bytes)


def compare_layers(name: str, made: QuantizedTensor, weight: torch.Tensor) -> None:
    """Print a layer's forward and backward pass, and one's of a bfloat16 weight."""
    x = torch.randn(TOKENS, made.columns, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, weight.shape[0], device=DEVICE, dtype=torch.bfloat16)
    found = medians(
        {
            "ours": lambda: torch.autograd.grad(linear(x, made), x, dy),
            "bfloat16": lambda: torch.autograd.grad(F.linear(x, weight), x, dy),
        }
    )
    show(f"{name} layer of {TOKENS} rows", found, "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="a small matrix")
    shape = DRY if parser.parse_args().dry else SHAPE
    print(f"{machine()}, a matrix of {shape} in bfloat16")
    for peer in ("bitsandbytes", "torchao"):
        if not find_spec(peer):
            print(f"{peer} is not installed")
    weight = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02
    for format_name in FORMATS:
        made = compare_conversions(format_name, weight)
        compare_noise(format_name, made)
        if CUDA:
            compare_products(format_name, made)
            compare_layers(format_name, made, weight)


if __name__ == "__main__":
    main()
