"""Kernels of others, called as ours are, where they are installed: Liger-Kernel's, QuACK's and
cut-cross-entropy's. They run on GPUs; some of Liger-Kernel's also in Triton's interpreter."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from penstock_kernels.op import INTERPRETED
from tests.bench.timing import CUDA, Work

Function = Callable[..., Any]

PACKAGES = {
    "liger": ("liger_kernel", "liger-kernel", CUDA or INTERPRETED),
    "quack": ("quack", "quack-kernels", CUDA),
    "cut-cross-entropy": ("cut_cross_entropy", "cut-cross-entropy", True),
}
"""By peer: what is imported, what is installed, and whether it runs here."""


def serves(peer: str) -> bool:
    """Whether it can be measured here."""
    package, _, runs = PACKAGES[peer]
    return runs and find_spec(package) is not None


def say_missing(*peers: str) -> None:
    """Name those that cannot be measured here."""
    for peer in peers:
        package, distribution, _ = PACKAGES[peer]
        if not serves(peer):
            reason = "needs a GPU" if find_spec(package) else f"pip install {distribution}"
            print(f"not measured: {peer} ({reason})")


def result_of(peer: str, work: Work) -> Any:
    """What it gives; or None, which is told, where it fails: that must not end a benchmark."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - another package may raise whatever it likes
        print(f"not measured: {peer} ({type(error).__name__}: {str(error)[:100]})")
        return None


def elementwise(
    eps: float, cos_TH: torch.Tensor, sin_TH: torch.Tensor
) -> dict[str, dict[str, Function]]:
    """By operation and by peer, with our arguments and results."""
    found: dict[str, dict[str, Function]] = {}

    def add(peer: str, functions: dict[str, Function]) -> None:
        for name, function in functions.items():
            found.setdefault(name, {})[peer] = function

    if liger := _module("liger", "liger_kernel.transformers.functional"):
        how = (eps, 0.0, "llama", False)

        def turned(q_TNH: torch.Tensor, k_TKH: torch.Tensor) -> Any:
            # It turns in place what it is given, heads before tokens.
            parts = [x_TNH[None].transpose(1, 2) for x_TNH in (q_TNH, k_TKH)]
            turned = liger.liger_rope(*parts, cos_TH[None], sin_TH[None])
            return tuple(x_1NTH.transpose(1, 2)[0] for x_1NTH in turned)

        add(
            "liger",
            {
                "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, *how),
                # The norm first, then the sum.
                "add_rms_norm": lambda x, stream, w: liger.liger_fused_add_rms_norm(
                    x, stream, w, *how
                )[::-1],
                "swiglu": liger.liger_swiglu,
                "geglu_tanh": liger.liger_geglu,
                "rope": turned,
            },
        )
    norms, rotary = (_module("quack", f"quack.{name}") for name in ("rmsnorm", "rotary"))
    if norms and rotary:
        half = cos_TH.shape[1] // 2

        def norm_of_sum(x: torch.Tensor, stream: torch.Tensor, w: torch.Tensor) -> Any:
            return norms.rmsnorm(x, w, residual=stream, eps=eps, prenorm=True)[::-1]

        def turned_each(q_TNH: torch.Tensor, k_TKH: torch.Tensor) -> Any:
            angles = cos_TH[:, :half], sin_TH[:, :half]
            return tuple(rotary.apply_rotary_emb(x[None], *angles)[0] for x in (q_TNH, k_TKH))

        add(
            "quack",
            {
                "rms_norm": lambda x, w: norms.rmsnorm(x, w, eps=eps),
                "add_rms_norm": norm_of_sum,
                "rope": turned_each,
            },
        )
    return found


def losses() -> dict[str, Function]:
    """By peer: hidden states [T, D], a head [V, D] and labels [T] to the sum of their losses."""
    found: dict[str, Function] = {}
    if liger := _module("liger", "liger_kernel.transformers.functional"):
        fused = liger.liger_fused_linear_cross_entropy
        found["liger"] = lambda x, w, labels: fused(x, w, labels, reduction="sum")
        found["liger, fp32 sums"] = lambda x, w, labels: fused(
            x, w, labels, reduction="sum", accum_dtype=torch.float32
        )
    if cut := _module("cut-cross-entropy", "cut_cross_entropy"):
        kind = "cce" if CUDA else "torch_compile"
        found["cut-cross-entropy"] = lambda x, w, labels: cut.linear_cross_entropy(
            x, w, labels, reduction="sum", impl=kind
        )
    if quack := _module("quack", "quack.linear_cross_entropy"):
        # Untuned, as its tuner takes minutes for each shape of a product.
        found["quack"] = lambda x, w, labels: quack.chunked_linear_cross_entropy(
            x, w, labels, reduction="sum", tuned=False
        )
    return found


def _module(peer: str, name: str) -> Any:
    """One of a peer's modules, or None where it does not serve."""
    return result_of(name, lambda: import_module(name)) if serves(peer) else None
