"""Random initialization of a model that is trained from scratch, one tensor at a time.

Each tensor has its own generator, seeded by its checkpoint name. So a seed gives the same model in
any order of initialization, on any number of ranks, fused or not.
"""

import hashlib
from collections.abc import Sequence

import torch

from penstock.models.decoder_config import DecoderConfig
from penstock.models.names import LAYER_SCALAR, LINEAR_ATTN


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
        if module == LINEAR_ATTN:
            # As in transformers: time steps of one, and decay rates between 0.01 and 16.
            if leaf == "dt_bias":
                return torch.ones(*shape, dtype=torch.float32)
            rates = torch.empty(*shape, dtype=torch.float32)
            return rates.uniform_(0.01, 16, generator=generator_for(name, seed)).log_()
        if leaf.endswith("bias"):
            return torch.zeros(*shape, dtype=torch.float32)
        if leaf == LAYER_SCALAR:
            return torch.ones(*shape, dtype=torch.float32)
        if f".{LINEAR_ATTN}." in name and module == "norm":
            return torch.ones(*shape, dtype=torch.float32)
        if "norm" in module:
            is_of_stream = module.endswith("layernorm") or module == "norm"
            is_plus_one = config.norm == "rms_1p" or (config.norm == "layer_1p" and is_of_stream)
            return torch.full(shape, 0.0 if is_plus_one else 1.0, dtype=torch.float32)
        start = torch.empty(*shape, dtype=torch.float32)
        return start.normal_(0.0, config.initializer_range, generator=generator_for(name, seed))
