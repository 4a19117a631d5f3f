"""Optimizers of PyTorch and torchao by fully qualified name, and of packages, with checked
arguments."""

import importlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from penstock.config.schema.optimizer import OptimConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.extensions import OPTIMIZERS

BUILTIN = {"Muon": "muon"}
UNSUPPORTED = {
    "LBFGS": "computes the loss several times in a step",
    "SparseAdam": "supports only sparse gradients",
}
RESERVED_ARGUMENTS = {
    "lr": "It is set by train.lr.",
    "weight_decay": "It is set by train.weight_decay.",
    "params": "They are the model's parameters.",
    "differentiable": "No gradient goes through a step here.",
}

TRIAL_LR = 1e-3


def named_optimizer(optim: OptimConfig) -> Callable[..., torch.optim.Optimizer]:
    """Factory (params, lr) -> optimizer for the class named in `train.optimizer`, with
    `train.optimizer_kwargs`. Raises ConfigError if there is no such optimizer, it is not supported,
    or it does not accept the arguments; CapabilityError if its package is not installed."""
    name, kwargs = optim.optimizer, optim.optimizer_kwargs
    optimizer_class = _resolve_class(name) if "." in name else OPTIMIZERS.load(name)
    parameters = inspect.signature(optimizer_class).parameters
    if optim.weight_decay and "weight_decay" not in parameters:
        raise ConfigError(
            f"train.weight_decay is {optim.weight_decay:g}, and {name} has no weight_decay.\n"
            "  Leave weight_decay out, or write another optimizer."
        )
    for argument, value in kwargs.items():
        if argument in RESERVED_ARGUMENTS or argument not in parameters:
            own = [parameter for parameter in parameters if parameter not in RESERVED_ARGUMENTS]
            near = get_close_matches(argument, own, 1)
            hint = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(own)}."
            raise ConfigError(
                f"train.optimizer_kwargs.{argument} is {value}, and {name} has no such argument."
                f"\n  {RESERVED_ARGUMENTS.get(argument, hint)}"
            )
    arguments = {
        argument: tuple(value) if isinstance(value, list) else value
        for argument, value in kwargs.items()
    }

    def build(params: Any, lr: float) -> torch.optim.Optimizer:
        return optimizer_class(params, lr=lr, **arguments)

    try:
        build([nn.Parameter(torch.zeros(2, 2))], TRIAL_LR)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{name} does not take train.optimizer_kwargs {dict(kwargs)}: {error}.\n"
            "  Leave out what it does not take; its own defaults then hold."
        ) from None
    return build


def _resolve_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    package, _, leaf = name.rpartition(".")
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise CapabilityError(
            f"train.optimizer is {name}, and {package.partition('.')[0]} is not installed.\n"
            f"  pip install {package.partition('.')[0]}, or write adamw."
        ) from None
    if leaf in BUILTIN and package == "torch.optim":
        raise ConfigError(
            f"train.optimizer is {name}; write {BUILTIN[leaf]}, which can be sharded."
        )
    if leaf in UNSUPPORTED:
        raise ConfigError(
            f"train.optimizer is {name}, which {UNSUPPORTED[leaf]}.\n  Write another, "
            "such as adamw."
        )
    attribute: Any = getattr(module, leaf, None)
    is_optimizer = isinstance(attribute, type) and issubclass(attribute, torch.optim.Optimizer)
    if not is_optimizer or attribute is torch.optim.Optimizer:
        optimizer_names = [
            other_name
            for other_name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        ]
        near = get_close_matches(leaf, optimizer_names, 1)
        hint = f"Did you mean {package}.{near[0]}?" if near else ""
        hint = hint or f"It has {', '.join(optimizer_names)}."
        raise ConfigError(
            f"train.optimizer is {name}, and {package} has no such optimizer.\n  {hint}"
        )
    return attribute
