"""Linear layers in float8, ours and torchao's: `python -m tests.bench.kernels.bench_fp8 [--tokens
T] [--rows N] [--columns K] [--dry]`.

First how far outputs and gradients are from float64's, of normal numbers and of some that stand
out; torchao's scales are powers of two as ours are, so that with the same recipe its errors are
ours. Then, on a GPU, a forward and backward pass against one in bfloat16: medians of five, in
turns. There a layer should be faster than bfloat16 (goal: 1.3 times with one scale for a tensor)
and torchao's compiled one not faster. On a CPU float8 is emulated: it needs a GPU to be of use.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from tests.bench.timing import CUDA, DEVICE, Work, machine, medians, verdict

from penstock_kernels.float8 import Float8Recipe, Recipe, linear

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]

OURS: Mapping[str, Float8Recipe] = {
    "tensorwise": Float8Recipe("tensorwise"),
    "rowwise": Float8Recipe("rowwise", "e4m3"),
    "rowwise, exact weights' gradient": Float8Recipe("rowwise", "e4m3", weight_gradient="exact"),
    "blockwise": Float8Recipe("blockwise", "e4m3"),
    "blockwise, turned": Float8Recipe("blockwise", "e4m3", block=32),
}
THEIRS: Mapping[str, str] = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise, exact weights' gradient": "rowwise_with_gw_hp",
}
"""torchao's names of the same."""

GOALS: Mapping[Recipe, float] = {"tensorwise": 1.3, "rowwise": 1.15, "blockwise": 1.1}
"""Times as fast as bfloat16."""


def torchao_layers(rows: int, columns: int) -> dict[str, torch.nn.Module]:
    """Its layers by our names; none where it is not installed."""
    if not find_spec("torchao"):
        print("not measured: torchao (pip install torchao)")
        return {}
    float8 = import_module("torchao.float8")
    made = {}
    for name, recipe in THEIRS.items():
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        base = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device=DEVICE)
        made[name] = float8.float8_linear.Float8Linear.from_float(
            base, replace(config, round_scales_to_power_of_2=True)
        )
    return made


def there_and_back(layer: Layer, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Work:
    """A pass forward and one backward: the output and both gradients."""

    def work() -> Tensors:
        y = layer(x, weight)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    return work


def errors(got: Tensors, want: Tensors) -> str:
    """Of the output, the gradient of its input and that of its weight."""
    off = [
        ((mine.double() - exact).norm() / exact.norm()).item()
        for mine, exact in zip(got, want, strict=True)
    ]
    return "  ".join(f"{error:.4f}" for error in off)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384 if CUDA else 1024)
    parser.add_argument("--rows", type=int, default=14_336 if CUDA else 1536)
    parser.add_argument("--columns", type=int, default=4096 if CUDA else 512)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    tokens, rows, columns = asked.tokens, asked.rows, asked.columns
    if asked.dry:
        tokens, rows, columns = 48, 32, 64
    if not CUDA:
        torch.set_num_threads(1)
    print(f"{machine()}, {tokens} tokens, {columns} -> {rows} features, bfloat16")
    theirs = torchao_layers(rows, columns)
    torch.manual_seed(0)
    shapes = (tokens, columns), (rows, columns), (tokens, rows)
    x, weight, dy = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    weight = torch.nn.Parameter(weight * 0.02)
    print("\nerrors of outputs, of inputs' gradients and of weights'")
    for numbers, factor in (("normal", 1.0), ("one feature 1000 times as large", 1000.0)):
        x = x.detach().clone()
        x[:, 3] *= factor
        x.requires_grad_()
        exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        want = there_and_back(F.linear, *exact, dy.double())()
        print(f"  {numbers}")
        for name, scheme in OURS.items():
            got = there_and_back(lambda x, w, how=scheme: linear(x, w, how), x, weight, dy)()
            line = f"    {name:34} ours {errors(got, want)}"
            if name in theirs:
                layer = theirs[name]
                layer.weight = weight
                made = there_and_back(lambda x, _, it=layer: it(x), x, weight, dy)()
                line += f"   torchao {errors(made, want)}"
            print(line)
    if not CUDA:
        print("\nnot measured: speed (needs a GPU)")
        return
    works: dict[str, Work] = {"bfloat16": there_and_back(F.linear, x, weight, dy)}
    for name, scheme in OURS.items():
        ours = lambda x, w, how=scheme: linear(x, w, how)  # noqa: E731
        works[name] = there_and_back(ours, x, weight, dy)
    for name, layer in theirs.items():
        layer.weight = weight
        fused = torch.compile(layer)
        works[f"torchao, {name}"] = there_and_back(lambda x, _, it=fused: it(x), x, weight, dy)
    spent = medians(works)
    print("\na forward and a backward pass")
    for name, scheme in OURS.items():
        line = f"  {name:34} {spent[name] * 1e3:8.3f} ms, "
        line += verdict(
            f"{name}: times as fast as bfloat16",
            spent["bfloat16"] / spent[name],
            GOALS[scheme.recipe],
        )
        if name in theirs:
            line += f", torchao/ours {spent[f'torchao, {name}'] / spent[name]:.2f}"
        print(line)


if __name__ == "__main__":
    main()
