"""Random initialization of a model that is trained from scratch, one tensor at a time.

Each tensor has its own generator, seeded by its checkpoint name. So a seed gives the same model in
any order of initialization, on any number of ranks, fused or not.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from penstock.models.decoder_config import DecoderConfig
from penstock.models.names import LAYER_SCALAR
from penstock.models.state_layer_config import InitialValues


def generator_for(name: str, seed: int) -> torch.Generator:
    """A CPU generator for the tensor with this name."""
    # Not hash(), which for text differs from process to process.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # On the CPU: a GPU's generator draws other numbers from the same seed.
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialize(name: str, shape: Sequence[int], seed: int, config: DecoderConfig) -> torch.Tensor:
    """The initial value of the checkpoint tensor `name`, fp32 on the CPU.

    Ones for norms (zeros for norms with 1 + weight), zeros for biases, otherwise normal with
    standard deviation `initializer_range` (transformers' `_init_weights`).
    """
    *_, module, leaf = name.split(".")
    with torch.device("cpu"):
        values = config.linear.initial_values(leaf) if config.linear else None
        if isinstance(values, InitialValues):
            return _draw(values, shape, generator_for(name, seed))
        if values is not None:
            return torch.full(shape, values, dtype=torch.float32)
        if leaf.endswith("bias"):
            return torch.zeros(*shape, dtype=torch.float32)
        if leaf == LAYER_SCALAR:
            return torch.ones(*shape, dtype=torch.float32)
        # Gated norms within a token mixer have a plain weight, whatever the residual stream's are.
        if config.linear and ".layers." in name and module in ("norm", "o_norm"):
            return torch.ones(*shape, dtype=torch.float32)
        if "norm" in module:
            # QK norms are RMSNorm in any family: `layer_1p` is of the residual stream alone.
            is_of_stream = module.endswith("layernorm") or module == "norm"
            is_plus_one = config.norm == "rms_1p" or (config.norm == "layer_1p" and is_of_stream)
            return torch.full(shape, 0.0 if is_plus_one else 1.0, dtype=torch.float32)
        start = torch.empty(*shape, dtype=torch.float32)
        return start.normal_(0.0, config.initializer_range, generator=generator_for(name, seed))


def _draw(values: InitialValues, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    low, high = values.low, values.high
    if values.kind == "log_number":
        return torch.arange(math.prod(shape), dtype=torch.float32).add_(low).log_().view(*shape)
    drawn = torch.empty(*shape, dtype=torch.float32)
    if values.kind == "log_uniform":
        return drawn.uniform_(low, high, generator=generator).log_()
    steps = drawn.uniform_(math.log(low), math.log(high), generator=generator).exp_()
    steps = steps.clamp_min_(values.floor)
    # expm1, because 1 - exp(-step) would lose the digits of a small step.
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
