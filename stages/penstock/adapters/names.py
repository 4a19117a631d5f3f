"""The names of an adapter's tensors: ours, and the layer of the base model each belongs to.

Ours are `<module>.lora_A.<part>` and `<module>.lora_B.<part>`, the two low-rank factors, and under
DoRA `<module>.lora_magnitude.<part>`, on the module that bears the base weight; `part` is the last
name of the layer in a checkpoint. The two differ for fused projections,
`…self_attn.qkv_proj.lora_A.q_proj` belongs to `…self_attn.q_proj`, and for experts.

The experts of a layer share one tensor for each of their matrices, and so do their factors. Those
that each expert has for itself are in `…mlp.experts.adapter`, one that all share is in
`…mlp.adapter`, and both belong to `…mlp.experts.*.gate_proj`, whatever the family calls these. In a
training checkpoint either is `…mlp.experts.lora_A.gate_proj`: [E, r, in], or [r, in] if shared.
"""

from typing import Literal, NamedTuple, cast

from penstock.models.weights import FUSED

Side = Literal["lora_A", "lora_B", "lora_magnitude"]
SIDES: tuple[Side, Side] = ("lora_A", "lora_B")
"""The two whose product is added to a weight."""
MAGNITUDE: Side = "lora_magnitude"

EMBEDDING = "model.embed_tokens"

EXPERTS = "experts"
ADAPTER = "adapter"
EACH = f"{EXPERTS}.*"
"""Stands for every expert of a layer."""


class Factor(NamedTuple):
    """The name of one of an adapter's tensors, taken apart."""

    module: str
    """The native module that bears the base weight."""
    side: Side
    part: str

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to a layer's experts."""
        return self._mixture is not None

    @property
    def of_embedding(self) -> bool:
        """Whether it belongs to the embedding, whose A is [r, vocabulary] and B [width, r]."""
        return self.module == EMBEDDING

    @property
    def hf_module(self) -> str:
        """The layer in a checkpoint of the base model; for experts, all of them at once."""
        if self._mixture is not None:
            return f"{self._mixture}.{EACH}.{self.part}"
        return f"{self.module.rpartition('.')[0]}.{self.part}".removeprefix(".")

    @property
    def _mixture(self) -> str | None:
        inner = self.module.removesuffix(f".{ADAPTER}").removesuffix(f".{EXPERTS}")
        return None if inner == self.module else inner


def parse_factor(name: str) -> Factor | None:
    """What of an adapter this native parameter is, or None for a parameter of the base model."""
    module, _, rest = name.rpartition(".lora_")
    side, _, part = f"lora_{rest}".partition(".")
    if not module or side not in (*SIDES, MAGNITUDE) or not part or "." in part:
        return None
    return Factor(module, cast(Side, side), part)


def native_name(hf_module: str, side: Side, fused_parts: frozenset[str] = frozenset()) -> str:
    """The native name of a factor of the checkpoint's linear layer `hf_module`; with nothing fused,
    the name it has in training checkpoints.

    `fused_parts` are the last names of the layers that the model keeps in one (`q_proj`, …).
    """
    parent, _, part = hf_module.rpartition(".")
    if parent.endswith(EACH):
        return f"{parent.removesuffix('.*')}.{side}.{part}"
    module = f"{parent}.{FUSED}" if part in fused_parts else hf_module
    return f"{module}.{side}.{part}"
