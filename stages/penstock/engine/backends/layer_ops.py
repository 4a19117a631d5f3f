"""Select the implementations of norms, activations, RoPE and attention dtype from the settings."""

from dataclasses import replace

from penstock.config.schema.model import ModelConfig
from penstock.config.schema.train import DropoutConfig
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.dropout import Dropout, DropoutRates
from penstock.models.layers.experts import ExpertOperations
from penstock.models.layers.layer_ops import LayerOps, layer_operations
from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.glu import packed_swiglu, swiglu


def dropout_config(written: DropoutConfig) -> DropoutRates:
    """The dropout rates of layers."""
    depth = "rising" if written.depth_scaling else "alike"
    rates = (written.hidden, written.ffn, written.attention)
    return DropoutRates(*rates, warmup_steps=written.warmup_steps, depth=depth)


def has_dropout(part: CausalLM) -> bool:
    """Whether the model part has any dropout, adapters included."""
    own = isinstance(part, AutoCausalLM) and part.config.outline.dropout
    return own or any(
        isinstance(module, Dropout) and module.is_enabled for module in part.modules()
    )


def select_layer_ops(model: ModelConfig) -> LayerOps:
    """PyTorch's native operations if the settings ask for them, otherwise the fastest available."""
    return layer_operations(
        norms="plain" if model.rmsnorm_native else "best",
        gates="plain" if model.activation_native else "best",
        rope_impl="plain" if model.rope_native else "best",
    )


def select_activation_impl(experts: ExpertOperations, model: ModelConfig) -> ExpertOperations:
    """Expert operations, with native activations if the settings ask for them."""
    if not model.activation_native:
        return experts
    return replace(
        experts,
        activate=swiglu.reference,
        packed_activate=packed_swiglu.reference,
        clamped_gate=clamped_gate.reference,
        fused=None,
    )
