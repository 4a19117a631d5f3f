"""What steps a client's model: the optimizer that it asked for. Its numbers come with each step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from penstock.config.rules.optimizer import arguments_are_the_optimizers
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.multi_lora.shared_base import SharedBase
from penstock.engine.optim.build import build_distributed_optimizer

DECAYS = "decays"
"""Whether weights of an optimizer's group decay, among the group's settings."""

OF_STEPS = ("betas", "eps")
"""Numbers that every step brings, of those that optimizers are told."""


def optimizer_for(
    run: RunConfig, trained: Sequence[LocalParam], substrate: SharedBase
) -> torch.optim.Optimizer:
    """One that has taken no step. Every rank calls it."""
    # Any decay: it is what tells apart what never decays, and each step brings its own.
    train = run.train.model_copy(update={"weight_decay": 1.0})
    built = substrate.built
    made = build_distributed_optimizer(
        run.model_copy(update={"train": train}),
        trained,
        substrate.family.roles,
        built.config.num_hidden_layers,
        substrate.ranks,
    )
    for group in made.param_groups:
        group[DECAYS] = bool(group["weight_decay"])
    return made


def override_optimizer(run: RunConfig, optimizer: Mapping[str, Any]) -> RunConfig:
    """The run with these settings of the train section. Raises ConfigError where no optimizer has
    them, or an adapter cannot be trained by it."""
    if not optimizer:
        return run
    for name in OF_STEPS:
        if name in optimizer.get("optimizer_kwargs", {}):
            raise ConfigError(
                f"the optimizer is told {name} with each step.\n  Leave it out of kwargs."
            )
    written = run.train.model_dump(exclude_unset=True)
    try:
        train = TrainConfig.model_validate({**written, **optimizer})
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"no optimizer here can be {dict(optimizer)}: {where}: {first['msg']}.\n"
            "  Leave optimizer_config out for the server's own."
        ) from None
    if train.optimizer == "muon" and run.lora.enable_lora:
        raise ConfigError(
            "Muon turns matrices of hidden layers, and a model with an adapter trains none of "
            "those: what it trains would be AdamW's.\n  Ask for adamw."
        )
    found = run.model_copy(update={"train": train})
    for fault in arguments_are_the_optimizers(found):
        raise ConfigError(f"optimizer_config: {fault.path[-1]}: {fault.text}.")
    return found
