"""The precision in which weights are kept while they are not computed with, and in checkpoints."""

from collections.abc import Sequence

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam
from penstock.models.decoder import Decoder
from penstock.models.weights import WeightMap


def cast_frozen_params(dtype: torch.dtype, model: Decoder) -> None:
    """Keep the matrices that no step changes in the precision that they are computed in, in place.

    But for routers that choose in fp32. Vectors stay as they are: they are small, and norms are
    computed in fp32.
    """
    exact = of_exact_routers(model)
    for parameter in model.parameters():
        is_matrix = parameter.is_floating_point() and parameter.dim() > 1
        if is_matrix and not parameter.requires_grad and id(parameter) not in exact:
            parameter.data = parameter.data.to(dtype)


def cast_params(dtype: torch.dtype, model: Decoder) -> None:
    """Keep every weight in this precision, in place, but for routers that choose in fp32."""
    exact = of_exact_routers(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in exact:
            parameter.data = parameter.data.to(dtype)


def of_exact_routers(model: Decoder) -> set[int]:
    """The identities of their parameters."""
    exact = [router for router in model.routers().values() if router.is_exact]
    return {id(parameter) for router in exact for parameter in router.parameters()}


def rounded_to(train: TrainConfig) -> torch.dtype | None:
    """What checkpoints hold weights in; None: in what they are kept."""
    if train.ckpt_weights == "master" or train.computes_in == train.keeps_in:
        return None
    return getattr(torch, train.computes_in)


def fp32_params(
    parts: Sequence[Decoder], held: Sequence[LocalParam], names: WeightMap
) -> frozenset[int]:
    """The identities of those that layers compute with as they are kept, whatever the others."""
    exact = {one for part in parts for one in of_exact_routers(part)}
    exact |= {
        id(one.parameter)
        for one in held
        if any(names.is_exact(piece.tensor) for piece in one.pieces)
    }
    return frozenset(exact)
