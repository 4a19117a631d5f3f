"""Every Triton kernel compiles for GPUs, on machines without one.

In a process of its own: under Triton's interpreter, which other tests need, nothing compiles.
"""

import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import penstock_kernels
from penstock_kernels.op import HAS_TRITON
from tests.kernels.compiling_for_gpus import name_of
from tests.kernels.gpu_resources import ARCHITECTURES, compile_all, read_golden
from tests.turns import one_day_in, todays

MOST_KEPT = 600
"""Compiled kernels that are kept, of half a megabyte or less."""

KERNELS = {
    "elementwise": {
        "clamped_swiglu.triton._backward",
        "clamped_swiglu.triton._forward",
        "dropout.triton._drop",
        "glu.triton._backward",
        "glu.triton._forward",
        "rms_norm.triton._add_partials",
        "rms_norm.triton._backward",
        "rms_norm.triton._forward",
        "rope.triton._turn",
    },
    "cross_entropy": {"cross_entropy.triton._slope", "cross_entropy.triton._tally"},
    "route": {
        "route.triton._route",
        "route.triton._route_gradient",
        "route.triton._route_stats",
    },
    "permute": {
        "permute.order_triton._order",
        "permute.order_triton._tally",
        "permute.triton._add",
        "permute.triton._copy",
        "permute.triton._weigh",
    },
    "group_gemm": {
        "group_gemm.triton._by_rows",
        "group_gemm.triton._of_groups",
        "group_gemm.triton._plan",
        "group_gemm.zeroing_triton._zero_rows",
    },
    "expert_mlp": {
        "expert_mlp.triton._gate_gradients",
        "expert_mlp.triton._sum_groups",
        "group_gemm.triton._by_rows",
        "group_gemm.triton._of_groups",
    },
    "quant": {
        "noise.triton._add",
        "quant.triton_dequantize._dequantize",
        "quant.triton_matmul._multiply",
        "quant.triton_quantize._by_groups",
        "quant.triton_quantize._by_rows",
        "quant.triton_quantize._by_tiles",
    },
    "float8": {
        "float8.triton_multiply._multiply",
        "float8.triton_quantize._quantize",
        "float8.triton_quantize._transpose",
    },
    "sparse_attention": {
        "sparse_attention.triton_latent.add_gradients",
        "sparse_attention.triton_latent.add_in_order",
        "sparse_attention.triton_latent.attend",
        "sparse_attention.triton_select.score",
    },
    "max_logits": {"max_logits.triton._max_logits"},
    "paged_attention": {
        "attention.paged.triton._merge",
        "attention.paged.triton._paged_attention",
    },
    "linear_attention": {
        "linear_attention.triton_backward.make_gradients",
        "linear_attention.triton_backward.scan_gradients",
        "linear_attention.triton_forward.make_products",
        "linear_attention.triton_forward.plan",
        "linear_attention.triton_forward.read_states",
        "linear_attention.triton_forward.scan_states",
        "linear_attention.triton_forward.sum_decays",
    },
    "causal_conv1d": {
        "causal_conv1d.triton._backward",
        "causal_conv1d.triton._forward",
        "causal_conv1d.triton._states",
    },
    "gated_rms_norm": {"gated_rms_norm.triton._backward", "gated_rms_norm.triton._forward"},
    "optimizers": {
        "adamw.triton._step",
        "newton_schulz.triton._symmetric",
        "stochastic_rounding.triton._round",
    },
}
"""What each function `compile_...` there compiles; other kernels are parts of these."""


def all_kernels() -> dict[str, set[str]]:
    """Every kernel of the package by name, and the kernels that each calls."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kernel = JITFunction | InterpretedFunction
    modules = pkgutil.walk_packages(penstock_kernels.__path__, "penstock_kernels.")
    found = {}
    for module in [import_module(each.name) for each in modules]:
        for value in vars(module).values():
            if isinstance(value, kernel) and value.fn.__module__ == module.__name__:
                names = {*value.fn.__code__.co_names} & {*vars(module)}
                used = [vars(module)[name] for name in names]
                parts = {name_of(each.fn) for each in used if isinstance(each, kernel)}
                found[name_of(value.fn)] = parts
    return found


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not published for this system")
def test_no_kernel_is_left_out_of_what_is_compiled():
    parts, reached = all_kernels(), set()
    waiting = set.union(*KERNELS.values())
    while waiting:
        reached |= waiting
        waiting = set.union(*(parts[name] for name in waiting)) - reached
    assert reached == set(parts)


@pytest.fixture
def compiler_cache(pytestconfig, tmp_path):
    """Where Triton finds what it has compiled in an earlier run of the tests: by a digest of the
    source, of all that it calls, of types, constants and options, and of the compiler itself."""
    cache = getattr(pytestconfig, "cache", None)
    if cache is None:
        return tmp_path
    folder = cache.mkdir("triton")
    # Nothing is ever asked again for a source that has changed.
    if len([*folder.iterdir()]) > MOST_KEPT:
        shutil.rmtree(folder)
    return folder


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not published for this system")
@one_day_in(3, of=0)
def test_todays_kernels_compile_for_an_h100_and_take_what_the_golden_file_says(compiler_cache):
    """`python -m tests.kernels.gpu_resources` writes it again, so that a change shows as a diff."""
    parts = todays([*KERNELS], 4)
    found = compile_all(90, parts, all_ways=False, cache=compiler_cache)
    assert {name.split()[0] for name in found} == set.union(*(KERNELS[part] for part in parts))
    golden = read_golden()
    if version("triton") == golden["triton"]:
        assert found == {name: golden["sm_90"].get(name) for name in found}


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not published for this system")
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_way_of_every_kernel_compiles_for_every_architecture(arch, tmp_path):
    found = compile_all(arch, [*KERNELS], all_ways=True, cache=tmp_path)
    golden = read_golden()
    if version("triton") == golden["triton"]:
        assert found == golden[f"sm_{arch}"]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_kernel_compiles_with_the_newest_triton(tmp_path):
    folder = tmp_path / "triton"
    install = ("pip", "install", "--quiet", "--no-deps", "--target", str(folder), "triton")
    made = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"triton cannot be installed here: {made.stderr[-200:]}")
    for arch in (90, 100):
        found = compile_all(
            arch, [*KERNELS], all_ways=False, cache=tmp_path / "cache", packages=folder
        )
        assert {name.split()[0] for name in found} == set.union(*KERNELS.values())
