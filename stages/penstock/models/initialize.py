"""Random initialization of a model that is trained from scratch, one tensor at a time.

Each tensor has its own generator, seeded by its checkpoint name. So a seed gives the same model in
any order of initialization, on any number of ranks, fused or not.
"""

import hashlib
from collections.abc import Sequence

import torch

from penstock.models.decoder_config import DecoderConfig


def generator_for(name: str, seed: int) -> torch.Generator:
    """A CPU generator for the tensor with this name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialize(name: str, shape: Sequence[int], seed: int, config: DecoderConfig) -> torch.Tensor:
    """The initial value of the checkpoint tensor `name`, fp32 on the CPU.

    Ones for norms (zeros for norms with 1 + weight), zeros for biases, otherwise normal with
    standard deviation `initializer_range` (transformers' `_init_weights`).
    """
    *_, module, leaf = name.split(".")
    with torch.device("cpu"):
        if leaf.endswith("bias") or (
            (module.endswith("layernorm") or module == "norm") and (config.norm == "layer_1p")
        ):
            return torch.zeros(*shape, dtype=torch.float32)
        if module.endswith("norm"):
            return torch.ones(*shape, dtype=torch.float32)
        start = torch.empty(*shape, dtype=torch.float32)
        return start.normal_(0.0, config.initializer_range, generator=generator_for(name, seed))
