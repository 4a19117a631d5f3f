"""The optimizer of a client's model; hyperparameters come with each step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from penstock.config.rules.optimizer import check_optimizer_kwargs
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.multi_lora.shared_base import SharedBase
from penstock.engine.optim.build import build_distributed_optimizer

DECAYS = "decays"
"""The key in an optimizer group for whether it has weight decay."""

STEP_HYPERPARAMETERS = ("betas", "eps")
"""Hyperparameters that every step brings."""


def optimizer_for(
    run: RunConfig, trained: Sequence[LocalParam], substrate: SharedBase
) -> torch.optim.Optimizer:
    """A new optimizer without state. Collective."""
    # Any weight decay: it only marks the groups with decay, and each step brings its own value.
    train = run.train.model_copy(update={"weight_decay": 1.0})
    run = run.model_copy(update={"train": train})
    optimizer = build_distributed_optimizer(
        run, trained, substrate.family.roles, substrate.built.config, substrate.ranks
    )
    for group in optimizer.param_groups:
        group[DECAYS] = bool(group["weight_decay"])
    return optimizer


def override_optimizer(run: RunConfig, optimizer: Mapping[str, Any]) -> RunConfig:
    """The run with these settings of the train section. Raises ConfigError if no optimizer has
    them, or if the optimizer cannot train an adapter."""
    if not optimizer:
        return run
    for name in STEP_HYPERPARAMETERS:
        if name in optimizer.get("optimizer_kwargs", {}):
            raise ConfigError(f"{name} is sent with each step.\n  Leave it out of kwargs.")
    # Without defaults, which may be others for the client's optimizer.
    written = run.train.model_dump(exclude_unset=True)
    try:
        train = TrainConfig.model_validate({**written, **optimizer})
    except ValidationError as error:
        [first, *_] = error.errors()
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"no optimizer here can be {dict(optimizer)}: {field}: {first['msg']}.\n"
            "  Leave optimizer_config out for the server's own."
        ) from None
    if train.optimizer == "muon" and run.lora.enable_lora:
        raise ConfigError(
            "Muon updates matrices of hidden layers, and a model with an adapter trains none of "
            "those: what it trains would be AdamW's.\n  Ask for adamw."
        )
    overridden = run.model_copy(update={"train": train})
    for fault in check_optimizer_kwargs(overridden):
        raise ConfigError(f"optimizer_config: {fault.path[-1]}: {fault.text}.")
    return overridden
