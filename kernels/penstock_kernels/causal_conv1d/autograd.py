"""causal_conv1d as custom operators with gradients, built from the functions of a backend.

T tokens, C channels, W taps, B documents.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.causal_conv1d.reference import Activation
from penstock_kernels.custom_op import fake_like, keep_inputs, needed, operator

Tensors = tuple[torch.Tensor, ...]


def differentiable(
    name: str, forward: Callable[..., Tensors], gradients: Callable[..., Tensors]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operation of the backend `name`.

    Args:
        forward: x, weight, bias, initial states, cu_seqlens and whether there is a SiLU, to y and
            final states.
        gradients: of y, of the final states and then the same, to those of x, weight, bias and the
            initial states.
    """
    gradients_of = operator(f"{name}_gradients", gradients, fake=fake_like(2, 3, 4, 5))

    def back(
        ctx: Any, dy_TC: torch.Tensor | None, dfinal_BWC: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Read once: under activation checkpointing each read recomputes, and a second one raises.
        inputs = ctx.saved_tensors
        if dy_TC is None:
            dy_TC = torch.zeros_like(inputs[0])
        return needed(ctx, gradients_of(dy_TC, dfinal_BWC, *inputs, *ctx.options))

    # Mostly nobody has a gradient of the final states.
    keep = keep_inputs(5, materialize_grads=False)
    conv_of = operator(name, forward, fake=_fake, keep=keep, backward=back)

    def causal_conv1d(
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        segments: VarlenMetadata,
        activation: Activation | None = None,
        initial_state_BWC: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = x_TC, weight_CW, bias_C, initial_state_BWC
        return conv_of(*inputs, segments.cu_seqlens, activation == "silu")

    return causal_conv1d


def _fake(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, *further: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, cu_seqlens, _ = further
    states = len(cu_seqlens) - 1, weight_CW.shape[1] - 1, x_TC.shape[1]
    return x_TC.new_empty(x_TC.shape), x_TC.new_empty(states)
