"""Linear attention as custom operators with gradients, built from the functions of a backend.

T tokens, B documents, G heads of queries and keys, N heads of values; K and V their widths.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.custom_op import fake_like, keep_inputs, needed, operator

Tensors = tuple[torch.Tensor, ...]


def differentiable(
    name: str,
    forward: Callable[..., Tensors],
    fake: Callable[..., Tensors],
    gradients: Callable[..., Tensors],
    *,
    num_saved: int,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operation of the backend `name`.

    Args:
        forward: q, k, v, log_decay, beta, initial states, cu_seqlens and the scale, to y, final
            states and `num_saved` tensors for the backward pass.
        fake: the fake implementation of `forward`.
        gradients: of y, of the final states, and then what is saved and the inputs of `forward`, to
            those of its tensors up to the initial states; those of absent ones are empty.
    """
    inputs_at = range(2 + num_saved, 8 + num_saved)
    gradients_of = operator(f"{name}_gradients", gradients, fake=fake_like(*inputs_at))

    def back(
        ctx: Any, dy_TNV: torch.Tensor | None, dfinal_BNKV: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        # Read once: under activation checkpointing each read recomputes, and a second one raises.
        tensors = ctx.saved_tensors
        inputs, saved = tensors[:7], tensors[7:]
        # Gradients are not materialized: only the final states have one.
        if dy_TNV is None:
            dy_TNV = torch.zeros_like(inputs[2])
        return needed(ctx, gradients_of(dy_TNV, dfinal_BNKV, *saved, *inputs, *ctx.options))

    # Mostly nobody has a gradient of the final states.
    keep = keep_inputs(7, *range(2, 2 + num_saved), materialize_grads=False)
    attention_of = operator(name, forward, fake=fake, keep=keep, backward=back)

    def linear_attention(
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TNV: torch.Tensor,
        log_decay_TN: torch.Tensor,
        beta_TN: torch.Tensor | None,
        segments: VarlenMetadata,
        scale: float,
        initial_state_BNKV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, initial_state_BNKV
        y_TNV, final_BNKV, *_ = attention_of(*inputs, segments.cu_seqlens, scale)
        return y_TNV, final_BNKV

    return linear_attention
