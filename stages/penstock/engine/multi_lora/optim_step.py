"""Optimizer step of a client's model on the gradients that its passes accumulated."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.core.errors import ConfigError, StageError
from penstock.engine.distributed.param_shards import local
from penstock.engine.multi_lora.model_pool import DECAYS, ModelPool, TenantModel
from penstock.engine.optim.clip_grad import gradient_norm, scale_gradients
from penstock.engine.peft.relora import ReLoRA
from penstock.optim.groups import MATRICES, RATE


class NotFiniteError(StageError):
    """The gradients are not finite."""


@dataclass(frozen=True)
class AdamParams:
    """A client's hyperparameters for one step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """0: no clipping."""


def step(residents: ModelPool, name: str, adam_params: AdamParams) -> dict[str, float]:
    """Step the optimizer and clear the gradients; collective.

    Returns metrics: the gradient norm before clipping, the learning rate, and the number of steps.
    If the passes asked for it, gradients are divided by the number of trained tokens. Muon matrices
    use the learning rate of the server config; betas and eps apply to Adam-like parameters.

    Raises:
        UnknownModelError: there is no model of this name.
        ConfigError: no gradients were accumulated, or eps is 0 although it prevents division by
            zero.
        NotFiniteError: the gradients are not finite. They are cleared, and nothing else has
            changed.
    """
    resident = residents.get(name)
    if resident.per is None:
        raise ConfigError(f"no gradients of {name} were gathered.\n  Pass data backward first.")
    if adam_params.eps <= 0 and any("eps" in group for group in resident.optimizer.param_groups):
        raise ConfigError(f"eps is {adam_params.eps:g}.\n  Give one above 0, such as 1e-12.")
    residents.activate(name)
    try:
        return _step(residents, resident, adam_params)
    finally:
        resident.zero_grad()
        residents.zero_grad()


def _step(residents: ModelPool, resident: TenantModel, adam_params: AdamParams) -> dict[str, float]:
    substrate, trained = residents.substrate, resident.trained
    for param in trained:
        param.parameter.grad = resident.gradients.get(param.name)
    gradients = [
        local(param.parameter.grad) for param in trained if param.parameter.grad is not None
    ]
    if resident.per == "token" and gradients:
        torch._foreach_div_(gradients, float(max(1, resident.tokens)))
    norm = gradient_norm(trained, substrate.ranks).item()
    if not math.isfinite(norm):
        raise NotFiniteError(
            f"the norm of the gradients of {resident.name} is {norm}; its weights were left as "
            "they were, and the gradients are forgotten.\n"
            "  Look at the losses of the passes since the last step, or lower learning_rate."
        )
    scale_gradients(trained, norm, adam_params.grad_clip_norm)
    _set(resident, adam_params, substrate.run.train.lr)
    substrate.built.engine.pre_update_hooks.run()
    resident.optimizer.step()
    substrate.reshard()
    resident.step += 1
    relora, adapter = substrate.built.engine.part(ReLoRA), resident.adapter
    if relora and adapter and relora.is_due(resident.step):
        # The step's own has the optimizer and the seed of the base, not those of a client's model.
        relora = replace(relora, optimizer=resident.optimizer, seed=adapter.seed)
        relora.merge(resident.step)
        substrate.reshard()
    return {
        "grad_norm": norm,
        "learning_rate": adam_params.learning_rate,
        "step": float(resident.step),
    }


def _set(resident: TenantModel, adam_params: AdamParams, lr_of_file: float) -> None:
    betas = adam_params.beta1, adam_params.beta2
    hyperparameters: dict[str, Any] = {"betas": betas, "eps": adam_params.eps}
    for group in resident.optimizer.param_groups:
        # RATE of Muon matrices is relative to the config's lr, so this gives them the Muon learning
        # rate of the config.
        rate = lr_of_file if group[MATRICES] else adam_params.learning_rate
        group["lr"] = rate * group[RATE]
        group["weight_decay"] = adam_params.weight_decay if group[DECAYS] else 0.0
        group.update({name: value for name, value in hyperparameters.items() if name in group})
