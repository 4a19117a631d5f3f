"""Initialization of LoRA parameters."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from penstock.adapters.lora import LoraLinear
from penstock.adapters.lora_embedding import LoraEmbedding
from penstock.adapters.names import MAGNITUDE, SIDES, parse_lora_name
from penstock.models.initialize import generator_for


def initial_lora(name: str, shape: Sequence[int], seed: int, *, merges: int = 0) -> torch.Tensor:
    """The initial value of the LoRA parameter with this native name, fp32 on the CPU.

    A is uniform in ±1/sqrt(in) (kaiming_uniform with a = sqrt 5, as in PEFT). B is zeros, so
    training starts at the base model. For an embedding, as in PEFT, A is zeros and B is normal. The
    generator is seeded by the layer's checkpoint name, so a layer gets the same values fused or
    not. Those of experts [E, r, in] are drawn one expert after another. `merges` counts the ReLoRA
    merges so far; each draws other values.
    """
    factor = parse_lora_name(name)
    assert factor is not None, f"{name} is not the name of a low-rank factor"
    assert factor.side in SIDES, f"{name} starts at norms of the base weight"
    # Generators of devices draw different numbers from one seed.
    with torch.device("cpu"):
        if factor.side == ("lora_A" if factor.is_embedding else "lora_B"):
            return torch.zeros(*shape, dtype=torch.float32)
        start = torch.empty(*shape, dtype=torch.float32)
        after = f" after {merges}" if merges else ""
        generator = generator_for(f"{factor.hf_module}.{factor.side}{after}", seed)
        if factor.is_embedding:
            return start.normal_(generator=generator)
        # As one matrix: of a stack [E, r, in], kaiming_uniform_ would take r * in for the fan.
        nn.init.kaiming_uniform_(start.view(-1, shape[-1]), a=math.sqrt(5), generator=generator)
        return start


def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialize all LoRA and DoRA parameters of the model in place. None may be on the meta
    device."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = parse_lora_name(name)
            if factor and factor.side != MAGNITUDE:
                parameter.copy_(initial_lora(name, parameter.shape, seed))
        for module in model.modules():
            if isinstance(module, (LoraLinear, LoraEmbedding)):
                module.init_magnitudes()
