"""What a model's norms, gates, rotary embedding and attention are computed with and in, as is
written."""

from dataclasses import replace

from penstock.config.model import ModelConfig
from penstock.models.layers.attention import Attend, in_bf16
from penstock.models.layers.experts import ExpertOperations
from penstock.models.layers.operations import Choice, Operations, layer_operations
from penstock_kernels.clamped_gate import clamped_gate
from penstock_kernels.glu import swiglu


def operations_as_written(model: ModelConfig) -> Operations:
    """PyTorch's plain operations where the settings want them, else the best that serve."""
    return layer_operations(
        norms=_choice(model.rmsnorm_native),
        gates=_choice(model.activation_native),
        turns=_choice(model.rope_native),
    )


def gates_as_written(experts: ExpertOperations, model: ModelConfig) -> ExpertOperations:
    """The operations of experts, with plain gates where the settings want them."""
    if not model.activation_native:
        return experts
    return replace(experts, activate=swiglu.reference, clamped_gate=clamped_gate.reference)


def precision_as_written(attend: Attend, model: ModelConfig) -> Attend:
    """Attention in bf16 where the settings want it, else in that of its inputs."""
    return in_bf16(attend) if model.attention_cast_bf16 else attend


def _choice(native: bool) -> Choice:
    return "plain" if native else "best"
