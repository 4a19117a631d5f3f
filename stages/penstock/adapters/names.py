"""Names of LoRA parameters, and the base layer that each belongs to.

Native names are `<module>.lora_A.<part>` and `<module>.lora_B.<part>` for the low-rank matrices and
`<module>.lora_magnitude.<part>` for DoRA, where `<module>` has the base weight and `<part>` is the
last component of the layer's checkpoint name. Module and layer differ for fused projections
(`…self_attn.qkv_proj.lora_A.q_proj` belongs to `…self_attn.q_proj`) and for experts.

The experts of a layer have one tensor for each of their matrices, and one for each LoRA parameter.
A parameter that is separate for each expert is in `…mlp.experts.adapter`, and one that all experts
share is in `…mlp.adapter`. Both belong to `…mlp.experts.*.gate_proj`, whatever the family's names
are. In a training checkpoint either is `…mlp.experts.lora_A.gate_proj`: [E, r, in], or [r, in] if
shared.
"""

from typing import Literal, NamedTuple, cast

from penstock.models.weights import QKV_PROJ

Side = Literal["lora_A", "lora_B", "lora_magnitude"]
# The two matrices whose product is added to a weight.
SIDES: tuple[Side, Side] = ("lora_A", "lora_B")
MAGNITUDE: Side = "lora_magnitude"

EMBEDDING = "model.embed_tokens"

EXPERTS = "experts"
ADAPTER = "adapter"
# Stands for every expert of a layer.
EACH = f"{EXPERTS}.*"


def is_of_experts(native: str) -> bool:
    """Whether a parameter stacks matrices of a layer's experts."""
    return ".mlp." in native and f".{EXPERTS}." in native


def is_expert_layer(name: str) -> bool:
    """Whether this layer, or native module, belongs to experts."""
    return name.rpartition(".")[0].endswith((f".{EXPERTS}", f".{EACH}"))


class LoraParamName(NamedTuple):
    """A parsed name of a LoRA parameter."""

    module: str
    """The native module that has the base weight."""
    side: Side
    part: str

    @property
    def is_expert(self) -> bool:
        return self._mixture is not None

    @property
    def is_embedding(self) -> bool:
        """Whether it belongs to the embedding, whose A is [r, vocabulary] and B [width, r]."""
        return self.module == EMBEDDING

    @property
    def hf_module(self) -> str:
        """The layer's checkpoint name in the base model, where that differs from the model's in the
        last part alone (otherwise `WeightMap.hf_layer` of it); for experts, with `*` for the
        expert's number."""
        if self._mixture is not None:
            return f"{self._mixture}.{EACH}.{self.part}"
        return f"{self.module.rpartition('.')[0]}.{self.part}".removeprefix(".")

    @property
    def _mixture(self) -> str | None:
        inner = self.module.removesuffix(f".{ADAPTER}").removesuffix(f".{EXPERTS}")
        return None if inner == self.module else inner


def parse_lora_name(name: str) -> LoraParamName | None:
    """Parse a native parameter name; None for a parameter of the base model."""
    module, _, suffix = name.rpartition(".lora_")
    side, _, part = f"lora_{suffix}".partition(".")
    if not module or side not in (*SIDES, MAGNITUDE) or not part or "." in part:
        return None
    return LoraParamName(module, cast(Side, side), part)


def native_name(hf_module: str, side: Side, fused_parts: frozenset[str] = frozenset()) -> str:
    """The native name of a LoRA parameter of the checkpoint layer `hf_module`; if nothing is fused,
    this is also its name in training checkpoints.

    `fused_parts` are the last name components of the layers that the model fuses (`q_proj`, …).
    """
    parent, _, part = hf_module.rpartition(".")
    if parent.endswith(EACH):
        return f"{parent.removesuffix('.*')}.{side}.{part}"
    module = f"{parent}.{QKV_PROJ}" if part in fused_parts else hf_module
    return f"{module}.{side}.{part}"
