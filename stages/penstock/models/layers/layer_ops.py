"""Kernels of a model's layers other than matmuls and attention, selected once when the model is
built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import torch
import torch.nn.functional as F

from penstock.models.decoder_config import Activation
from penstock_kernels.gated_rms_norm import gated_rms_norm
from penstock_kernels.glu import geglu, geglu_tanh, packed_swiglu, swiglu
from penstock_kernels.op import Op
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope

P = ParamSpec("P")
R = TypeVar("R")

Choice = Literal["best", "plain"]
"""`best`: the best kernel that supports the inputs; `plain`: eager PyTorch with the same rounding
as Hugging Face's models."""

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

GATES: Mapping[Activation, Op[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": geglu_tanh,
}


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Activations of MLPs without a gate."""


@dataclass(frozen=True)
class LayerOps:
    """The kernels of one model."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_rms_norm: Callable[..., torch.Tensor]
    gates: Mapping[Activation, Gate]
    """The elementwise part of a gated MLP (SwiGLU, GeGLU), by activation."""
    packed_swiglu: Callable[[torch.Tensor], torch.Tensor]
    """SwiGLU of rows that hold gate and up."""
    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def packed_gate(self, activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
        if activation == "silu":
            return self.packed_swiglu
        gate = self.gates[activation]
        return lambda both_TF: gate(*both_TF.chunk(2, dim=-1))


def layer_operations(
    *, norms: Choice = "best", gates: Choice = "best", rope_impl: Choice = "best"
) -> LayerOps:
    """Select implementations of norms, gated activations and RoPE (`rope_impl`)."""
    return LayerOps(
        rms_norm=_select(rms_norm, norms),
        add_rms_norm=_select(add_rms_norm, norms),
        gated_rms_norm=_select(gated_rms_norm, norms),
        gates={name: _select(gate, gates) for name, gate in GATES.items()},
        packed_swiglu=_select(packed_swiglu, gates),
        rope=_select(rope, rope_impl),
    )


def _select(op: Op[P, R], choice: Choice) -> Callable[P, R]:
    return op.reference if choice == "plain" else op


DEFAULT_LAYER_OPS = layer_operations()
