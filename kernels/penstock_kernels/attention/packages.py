"""attention through the FlashAttention packages, 2 to 4: one call for all documents.

Each has a function of the same name, with different parameters. They are imported at the first
call, because each loads or builds its kernels then.

T tokens; N query heads, K key/value heads, H head width.
"""

# pyright: reportMissingImports=false
# pyright: reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.attention.flash import unsupported_inputs, unsupported_masks
from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.attention.sinks import gradient_of_sinks
from penstock_kernels.flash_packages import HOPPER, PACKAGES


def unsupported_reason(
    name: str,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """Why the package of that name does not support this; None if it does."""
    del scale
    package = PACKAGES[name]
    if reason := unsupported_inputs(q_TNH, k_TKH, v_TKH, segments, sinks_N):
        return reason
    if q_TNH.shape[-1] > package.widest:
        return f"heads are {q_TNH.shape[-1]} wide, and it takes up to {package.widest}"
    if reason := unsupported_masks(segments):
        return reason
    if sinks_N is not None and not package.sinks:
        return "heads have sinks, and it has none"
    if soft_cap is not None and not package.soft_cap:
        return f"scores are capped at {soft_cap}, and its backward pass does not cap them"
    major, minor = torch.cuda.get_device_capability(q_TNH.device)
    if major not in package.generations:
        first, last = package.generations[0], package.generations[-1]
        return (
            f"the GPU has capability {major}.{minor}, and it has kernels for {first}.x to {last}.x"
        )
    if name == "flash_attention_4" and major == HOPPER:
        if window is not None:
            return "a window slides, and on Hopper its backward pass has none"
        if torch.are_deterministic_algorithms_enabled():
            return "results are to be the same each time, and on Hopper its backward pass's are not"
    return None


def flash_attention_2(*args: Any, **settings: Any) -> torch.Tensor:
    """Same as the reference, except for sinks."""
    from flash_attn import flash_attn_varlen_func  # noqa: PLC0415

    return _without_sinks(flash_attn_varlen_func, *args, **settings)


def flash_attention_3(*args: Any, **settings: Any) -> torch.Tensor:
    """Same as the reference, except for sinks."""
    from flash_attn_interface import flash_attn_varlen_func  # noqa: PLC0415

    return _without_sinks(flash_attn_varlen_func, *args, **settings)


def _without_sinks(
    varlen: Callable[..., Any],
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    assert sinks_N is None, "refused"
    y_TNH = varlen(
        q_TNH,
        k_TKH,
        v_TKH,
        **_bounds(segments),
        softmax_scale=scale,
        causal=True,
        window_size=_past(segments, window, everything=-1),
        softcap=soft_cap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    # Early releases of version 3 also return the log-sum-exp.
    return y_TNH[0] if isinstance(y_TNH, tuple) else y_TNH


def flash_attention_4(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Same as the reference, except for soft caps. Sinks are rounded to bf16."""
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415

    assert soft_cap is None, "refused"
    sinks = None if sinks_N is None else sinks_N.detach().to(torch.bfloat16)
    y_TNH, lse_NT = flash_attn_varlen_func(
        q_TNH,
        k_TKH,
        v_TKH,
        **_bounds(segments),
        softmax_scale=scale,
        causal=True,
        window_size=_past(segments, window, everything=None),
        learnable_sink=sinks,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=sinks_N is not None,
    )
    # Not all of its releases have a gradient for sinks.
    return y_TNH if sinks_N is None else _WithSinks.apply(y_TNH, lse_NT.detach(), sinks_N)


def _bounds(segments: VarlenMetadata) -> dict[str, Any]:
    return {
        "cu_seqlens_q": segments.cu_seqlens,
        "cu_seqlens_k": segments.cu_seqlens,
        "max_seqlen_q": segments.max_length,
        "max_seqlen_k": segments.max_length,
    }


def _past(
    segments: VarlenMetadata, window: int | None, *, everything: int | None
) -> tuple[int | None, int | None]:
    """Window to the left and to the right."""
    narrowed = segments.effective_window(window)
    # Without a window both are `everything`, and the causal mask hides the right.
    return (everything, everything) if narrowed is None else (narrowed - 1, 0)


class _WithSinks(torch.autograd.Function):
    """Output that was computed with sinks, unchanged, and the sinks' gradient."""

    @staticmethod
    def forward(
        ctx: Any, y_TNH: torch.Tensor, lse_NT: torch.Tensor, sinks_N: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y_TNH, lse_NT, sinks_N)
        return y_TNH.view_as(y_TNH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        y_TNH, lse_NT, sinks_N = ctx.saved_tensors
        return dy_TNH, None, gradient_of_sinks(dy_TNH, y_TNH, lse_NT.t(), sinks_N)
