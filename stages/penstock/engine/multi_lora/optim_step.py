"""One step of a model's optimizer along the gradients that its passes gathered."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.core.errors import ConfigError, StageError
from penstock.engine.distributed.param_shards import local
from penstock.engine.multi_lora.client_optimizer import DECAYS
from penstock.engine.multi_lora.model_pool import ModelPool, TenantModel
from penstock.engine.optim.clip_grad import gradient_norm, scale_gradients
from penstock.optim.groups import MATRICES, RATE


class NotFiniteError(StageError):
    """Gradients are no numbers to step along."""


@dataclass(frozen=True)
class AdamParams:
    """What a client says of one step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """0: nothing is clipped."""


def step(residents: ModelPool, name: str, numbers: AdamParams) -> dict[str, float]:
    """Step, and forget the gradients. Every rank calls it. Returns what there is to tell: the norm
    of the gradients before they were clipped, the rate, and how many steps were taken.

    Where passes asked for it gradients are divided by the number of trained tokens. Matrices that
    Muon turns move at the rate of the server's file; betas and eps are of whatever is like Adam.

    Raises:
        UnknownModelError: if no model is called so.
        ConfigError: nothing was gathered, or eps is 0 where it keeps what never moves from being no
            number.
        NotFiniteError: the gradients are not finite. They are forgotten, and nothing else changed.
    """
    resident = residents.get(name)
    if resident.per is None:
        raise ConfigError(f"no gradients of {name} were gathered.\n  Pass data backward first.")
    if numbers.eps <= 0 and any("eps" in group for group in resident.optimizer.param_groups):
        raise ConfigError(f"eps is {numbers.eps:g}.\n  Give one above 0, such as 1e-12.")
    residents.enter(name)
    try:
        return _step(residents, resident, numbers)
    finally:
        resident.drop_gradients()
        residents.forget_gradients()


def _step(residents: ModelPool, resident: TenantModel, numbers: AdamParams) -> dict[str, float]:
    substrate, trained = residents.substrate, resident.trained
    for one in trained:
        one.parameter.grad = resident.gradients.get(one.name)
    gradients = [local(one.parameter.grad) for one in trained if one.parameter.grad is not None]
    if resident.per == "token" and gradients:
        torch._foreach_div_(gradients, float(max(1, resident.tokens)))
    norm = gradient_norm(trained, substrate.ranks)
    if not torch.isfinite(norm):
        raise NotFiniteError(
            f"the norm of the gradients of {resident.name} is {norm.item()}; its weights were left "
            "as they were, and the gradients are forgotten.\n"
            "  Look at the losses of the passes since the last step, or lower learning_rate."
        )
    scale_gradients(trained, norm, numbers.grad_clip_norm)
    _set(resident, numbers, substrate.run.train.lr)
    substrate.built.engine.changes.begin()
    resident.optimizer.step()
    substrate.settle()
    resident.step += 1
    _merge(residents, resident)
    return {
        "grad_norm": norm.item(),
        "learning_rate": numbers.learning_rate,
        "step": float(resident.step),
    }


def _set(resident: TenantModel, numbers: AdamParams, lr_of_file: float) -> None:
    told: dict[str, Any] = {"betas": (numbers.beta1, numbers.beta2), "eps": numbers.eps}
    for group in resident.optimizer.param_groups:
        # The rate of matrices is a share of the file's, which makes it the file's own for them.
        rate = lr_of_file if group[MATRICES] else numbers.learning_rate
        group["lr"] = rate * group[RATE]
        group["weight_decay"] = numbers.weight_decay if group[DECAYS] else 0.0
        group.update({name: value for name, value in told.items() if name in group})


def _merge(residents: ModelPool, resident: TenantModel) -> None:
    """Make what the adapter has learnt part of the base, where and when the file says so."""
    substrate = residents.substrate
    merging = substrate.built.engine.merging
    if merging is None or resident.adapter is None or not merging.is_due(resident.step):
        return
    mine = replace(merging, optimizer=resident.optimizer, seed=resident.adapter.seed)
    mine.merge(resident.step)
    substrate.settle()
