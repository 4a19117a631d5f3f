"""The shipped recipes of models and hardware, and what a run of each takes of its devices."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock.config.loading.load import load
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.device_speed import Machine, find_machine
from penstock.estimate.costs.estimate import Prediction, build_cost_model, predict
from penstock.estimate.machine import world_size
from tests.conftest import ROOT
from tests.docs.architectures import ARCHITECTURES

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*gb.yaml"))
"""Those that name their hardware: `vision-quickstart` needs none in particular."""
HARDWARE = re.compile(r"-(?:(\d+)x|cpu)(\d+)gb$")


@dataclass(frozen=True)
class Hardware:
    """What a recipe's name says: so many devices of so many bytes each."""

    devices: int
    memory: float
    has_gpus: bool

    @property
    def machine(self) -> Machine:
        if self.has_gpus:
            return replace(find_machine("H100"), memory=self.memory)
        return Machine("cpu", "cpu", {}, None, memory=self.memory)


def parse_hardware(name: str) -> Hardware:
    """`qwen3-8b-sft-8x80gb`: eight GPUs of 80e9 bytes; `...-cpu16gb`: one process on CPUs."""
    found = HARDWARE.search(name)
    assert found, f"{name} does not end with its hardware"
    return Hardware(int(found[1] or 1), 1e9 * int(found[2]), bool(found[1]))


@cache
def load_recipe(path: Path) -> RunConfig:
    return load(path)


@cache
def predict_costs(path: Path) -> Prediction:
    """What `penstock plan` computes, with the published architecture of the recipe's model."""
    run, hardware = load_recipe(path), parse_hardware(path.stem)
    assert run.model.model_path
    model = build_cost_model(run, ARCHITECTURES[run.model.model_path])
    dims = compute_dims(run.train, world_size(run))
    assert isinstance(dims, ParallelDims), dims
    return predict(run, model, dims, hardware.machine, None)
