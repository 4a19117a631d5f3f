"""The optimizer a run asks for."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.optim.groups import RATE, parameter_groups

OptimizerName = Literal["adamw", "sgd"]

ADAMW_BETAS = (0.9, 0.95)
"""Llama's and Qwen's choice; torch's own second one, 0.999, forgets too slowly for short runs."""
ADAMW_EPS = 1e-8


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    optimizer: OptimizerName,
    lr: float,
    weight_decay: float = 0.0,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
    lora_plus_ratio: float = 1.0,
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, grouped as `groups.parameter_groups` says.

    `sgd` is plain: no momentum, and weight decay is part of the gradient, as torch has it.

    Raises:
        ConfigError: if there is nothing to train.
    """
    groups = parameter_groups(
        named_parameters, weight_decay, no_decay_modules, no_decay_params, lora_plus_ratio
    )
    for group in groups:
        group["lr"] = lr * group[RATE]
    if not groups:
        raise ConfigError(
            "no parameter of the model is trainable. "
            "Set lora.enable_lora, or load a model whose parameters are not all frozen."
        )
    if optimizer == "sgd":
        # Not fused: torch has no such kernel for parameters that are sharded.
        return torch.optim.SGD(groups, lr=lr, foreach=True)
    # One pass over each tensor; without it a step makes several temporaries of every weight's size.
    return torch.optim.AdamW(groups, lr=lr, betas=ADAMW_BETAS, eps=ADAMW_EPS, fused=True)
