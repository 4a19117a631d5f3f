"""The names of low-rank factors: ours, and the linear layer of the base model each belongs to.

Ours are `<module>.lora_A.<part>` and `<module>.lora_B.<part>`, on the module that bears the base
weight; `part` is the last name of the linear layer in a checkpoint. The two differ for fused
projections alone: `…self_attn.qkv_proj.lora_A.q_proj` belongs to `…self_attn.q_proj`.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

import torch

from penstock.models.weights import FUSED

Side = Literal["lora_A", "lora_B"]
SIDES = ("lora_A", "lora_B")


class Factor(NamedTuple):
    """One low-rank factor's name, taken apart."""

    module: str
    """The native module that bears the base weight."""
    side: Side
    part: str

    @property
    def hf_module(self) -> str:
        """The linear layer in a checkpoint of the base model."""
        return f"{self.module.rpartition('.')[0]}.{self.part}".removeprefix(".")


def factor_of(name: str) -> Factor | None:
    """The factor that this native parameter is, or None for a parameter of the base model."""
    module, _, rest = name.rpartition(".lora_")
    side, _, part = f"lora_{rest}".partition(".")
    if not module or side not in SIDES or not part or "." in part:
        return None
    return Factor(module, cast(Side, side), part)


def native_name(hf_module: str, side: Side, fused_parts: frozenset[str] = frozenset()) -> str:
    """The native name of a factor of the checkpoint's linear layer `hf_module`.

    `fused_parts` are the last names of the layers that the model keeps in one (`q_proj`, …).
    """
    parent, _, part = hf_module.rpartition(".")
    module = f"{parent}.{FUSED}" if part in fused_parts else hf_module
    return f"{module}.{side}.{part}"


def factor_pairs(
    state: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the linear layer in a checkpoint that they belong to; without other tensors."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        if factor := factor_of(name):
            sides.setdefault(factor.hf_module, {})[factor.side] = tensor
    return {module: (pair["lora_A"], pair["lora_B"]) for module, pair in sides.items()}
