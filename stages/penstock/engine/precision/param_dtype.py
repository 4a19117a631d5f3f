"""Parameter dtypes: the precision of stored weights, and of weights in checkpoints."""

from collections.abc import Sequence

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam
from penstock.models.causal_lm import CausalLM
from penstock.models.weights import WeightMap


def cast_params(dtype: torch.dtype, model: CausalLM, *, frozen_matrices: bool = False) -> None:
    """Cast every weight, or every frozen matrix, to `dtype`, in place.

    Except routers that compute in fp32. Frozen vectors are small, and norms are computed in fp32.
    """
    exact = of_fp32_modules(model)
    for parameter in model.parameters():
        if frozen_matrices and (parameter.requires_grad or parameter.dim() <= 1):
            continue
        if parameter.is_floating_point() and id(parameter) not in exact:
            # `data` keeps the Parameter object, which tied modules share.
            parameter.data = parameter.data.to(dtype)


def of_fp32_modules(model: CausalLM) -> set[int]:
    """The ids of the parameters of modules that compute in fp32."""
    return {id(p) for module in model.fp32_modules() for p in module.parameters()}


def rounded_to(train: TrainConfig) -> torch.dtype | None:
    """The dtype of weights in checkpoints; None: the dtype of the parameters."""
    if train.ckpt_weights == "master" or train.computes_in == train.keeps_in:
        return None
    return getattr(torch, train.computes_in)


def fp32_params(
    parts: Sequence[CausalLM], params: Sequence[LocalParam], names: WeightMap
) -> frozenset[int]:
    """The ids of parameters that layers always use in fp32."""
    exact = {tensor for part in parts for tensor in of_fp32_modules(part)}
    exact |= {
        id(param.parameter)
        for param in params
        if any(names.is_exact(piece.tensor) for piece in param.shards)
    }
    return frozenset(exact)
