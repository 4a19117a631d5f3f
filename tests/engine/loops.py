"""A training loop of this rank, opened up before its first step so that a test may watch it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engine.assemble import assemble
from penstock.engine.hf_config import read_hf_config
from penstock.engine.ranks import Ranks, join
from penstock.models.decoder import Decoder
from penstock.train.job import Job
from penstock.train.loop import Loop
from penstock.train.stopping import StopRequest
from tests.engine import runs

Arrays = dict[str, np.ndarray]
"""By parameter; tensors do not outlive the process of their rank."""


def loop_of(job: Job, ranks: Ranks | None = None) -> Loop:
    """The loop that `penstock.train.main` would run, with everything it stands on."""
    torch.set_num_threads(1)
    ranks = ranks or join(60)
    hf_config = read_hf_config(job.config_path, job.config.model.foundation)
    built = assemble(job.config, hf_config, job.weights, ranks, lambda _: None)
    return Loop(job, built, ranks, StopRequest())


def decoder_of(loop: Loop) -> Decoder:
    """The model itself, without what a layout may have wrapped around it."""
    model = loop.built.trained.model
    assert isinstance(model, Decoder)
    return model


def parameters_of(loop: Loop) -> Arrays:
    """Every parameter's whole value, by name."""
    parameters = decoder_of(loop).named_parameters()
    return {name: runs.whole(parameter).numpy() for name, parameter in parameters}


def before_each_update(loop: Loop, look: Callable[[], Any]) -> list[Any]:
    """What `look` finds just before every step of the optimizer; filled while the loop runs."""
    found: list[Any] = []
    loop.built.engine.optimizer.register_step_pre_hook(lambda *_: found.append(look()))
    return found


def gradients_of(loop: Loop) -> Arrays:
    """The whole gradient of every parameter that has one."""
    parameters = decoder_of(loop).named_parameters()
    return {name: runs.whole(p.grad).numpy() for name, p in parameters if p.grad is not None}


def calls_of(module: nn.Module, look: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
    """What `look` finds in the arguments of every call of `module`; filled while the loop runs."""
    found: list[Any] = []
    module.register_forward_pre_hook(lambda _, arguments: found.append(look(arguments)))
    return found


def step(loop: Loop) -> dict[str, Any]:
    """The next step and its record, without the save that ends a run."""
    return loop._step()


def each(look: Callable[[Job], Any], jobs: Mapping[str, Job]) -> dict[str, Any]:
    """What `look` finds for each job: several looks for the price of one start of the ranks."""
    return {name: look(job) for name, job in jobs.items()}
