"""The random start of a model trained from scratch, one tensor at a time.

Each tensor has its own generator, seeded by its name in a checkpoint. So the same seed gives the
same model in whatever order, on however many machines, and fused or not, it is filled.
"""

import hashlib
from collections.abc import Sequence

import torch

from penstock.models.decoder_config import DecoderConfig


def generator_for(name: str, seed: int) -> torch.Generator:
    """A CPU generator of its own for the tensor of this name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialise(name: str, shape: Sequence[int], seed: int, config: DecoderConfig) -> torch.Tensor:
    """The start of the checkpoint tensor `name`, fp32 on the CPU.

    Ones for norms (zeros where 1 is added to them), zeros for biases, else normal with deviation
    `initializer_range` (transformers' `_init_weights`).
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
