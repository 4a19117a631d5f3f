"""Build the optimizer of a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.config.schema.optimizer import KWARGS, OptimConfig
from penstock.core.errors import ConfigError
from penstock.core.extensions import OPTIMIZERS
from penstock.optim.anyprecision import AnyPrecisionAdamW, StatePrecision
from penstock.optim.groups import RATE, Grouping, parameter_groups
from penstock.optim.muon import Directions, Muon, Orthogonalizer, UnshardedDirections
from penstock.optim.novograd import NovoGrad, Tensors, UnshardedTensors
from penstock.optim.optimizer_by_name import named_optimizer

EXACT = StatePrecision()


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optim: OptimConfig,
    grouping: Grouping | None = None,
    *,
    precision: StatePrecision = EXACT,
    directions: Directions | None = None,
    tensors: Tensors | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters, with the groups of `parameter_groups`.

    `precision` applies to the optimizers implemented here: AdamW unless all is float32, Muon, and
    NovoGrad. `directions` computes Muon's updates and `tensors` NovoGrad's norms; the defaults are
    for parameters that are not sharded. Raises ConfigError if no parameter is trainable, or the
    optimizer does not accept its arguments.
    """
    grouping = grouping or Grouping(optim.weight_decay)
    groups = parameter_groups(named_parameters, grouping)
    for group in groups:
        group["lr"] = optim.lr * group[RATE]
    if not groups:
        raise ConfigError(
            "no parameter of the model is trainable. "
            "Set lora.enable_lora, or load a model whose parameters are not all frozen."
        )
    if optim.optimizer not in OPTIMIZERS.builtins:
        return named_optimizer(optim)(groups, lr=optim.lr)
    build = OPTIMIZERS.load(optim.optimizer)
    return build(groups, optim, Sharding(precision, directions, tensors))


@dataclass(frozen=True)
class Sharding:
    """How optimizers of ours compute over shards, and in which precision."""

    precision: StatePrecision = EXACT
    directions: Directions | None = None
    tensors: Tensors | None = None


Groups = list[dict[str, Any]]


def adamw(groups: Groups, optim: OptimConfig, sharding: Sharding) -> torch.optim.Optimizer:
    """AdamW: torch's if all is float32."""
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    dtypes = {dtype for param in parameters for dtype in (param.dtype, param.grad_dtype)}
    # torch.optim's AdamW would keep the states of bfloat16 weights, and add to them, in bfloat16.
    if dtypes != {torch.float32}:
        return anyprecision_adamw(groups, optim, sharding)
    # Fused: one pass over each tensor, instead of several temporaries of every weight's size.
    return torch.optim.AdamW(groups, **_adam(optim), fused=True)


def anyprecision_adamw(groups: Groups, optim: OptimConfig, sharding: Sharding) -> AnyPrecisionAdamW:
    """AdamW with states and weights of any precision."""
    return AnyPrecisionAdamW(groups, **_adam(optim), precision=sharding.precision)


def sgd(groups: Groups, optim: OptimConfig, _: Sharding) -> torch.optim.SGD:
    """SGD. Not fused: torch has no fused SGD kernel for sharded parameters (DTensor)."""
    return torch.optim.SGD(groups, lr=optim.lr, foreach=True, **_kwargs(optim))


def muon(groups: Groups, optim: OptimConfig, sharding: Sharding) -> Muon:
    """Muon for hidden matrices, and AdamW for the rest."""
    return Muon(
        groups,
        **_adam(optim),
        momentum=optim.muon_momentum,
        nesterov=optim.muon_nesterov,
        precision=sharding.precision,
        directions=sharding.directions or UnshardedDirections(newton_schulz_args(optim)),
    )


def novograd(groups: Groups, optim: OptimConfig, sharding: Sharding) -> NovoGrad:
    """NovoGrad, as in NeMo."""
    kwargs, tensors = _kwargs(optim), sharding.tensors or UnshardedTensors()
    flags = {name: kwargs[name] for name in ("grad_averaging", "amsgrad")}
    return NovoGrad(groups, **_adam(optim), **flags, precision=sharding.precision, tensors=tensors)


def _kwargs(optim: OptimConfig) -> dict[str, Any]:
    return {**KWARGS[optim.optimizer], **optim.optimizer_kwargs}


def _adam(optim: OptimConfig) -> dict[str, Any]:
    kwargs = _kwargs(optim)
    return {"lr": optim.lr, "betas": tuple(kwargs["betas"]), "eps": kwargs["eps"]}


def newton_schulz_args(optim: OptimConfig) -> Orthogonalizer:
    """Muon's orthogonalization settings from the config."""
    return Orthogonalizer(optim.muon_ns_steps, optim.muon_adjust_lr_fn or "original")
