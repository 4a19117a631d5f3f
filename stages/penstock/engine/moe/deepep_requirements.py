"""DeepEP requirements: checks for GPUs, NVLink and the package before ranks start.

No torch here. The ranks check what needs torch.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NoReturn

from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import CapabilityError
from penstock.core.machine.gpus import Gpus

PACKAGE = "deep_ep"
MIN_CAPABILITY = (9, 0)

NO_DROPOUT = (
    "model.ep_dispatch is deepep, which does not say which token a row is of, and lora.lora_dropout"
    " is set for adapters of experts.\n"
    "  Write model.ep_dispatch: alltoall, or lora_dropout: 0."
)


def require_nvlink(run: RunConfig, gpus: Gpus) -> None:
    """Raise CapabilityError for `model.ep_dispatch: deepep` without its package, recent GPUs or
    NVLink."""
    if run.model.ep_dispatch != "deepep":
        return
    if not gpus.count:
        _refuse("which needs CUDA devices, and there is none")
    if find_spec(PACKAGE) is None:
        _refuse(
            f"and the package {PACKAGE} is not installed; it is built from "
            "https://github.com/deepseek-ai/DeepEP"
        )
    if gpus.capability and gpus.capability < MIN_CAPABILITY:
        needs, has = (".".join(map(str, version)) for version in (MIN_CAPABILITY, gpus.capability))
        _refuse(f"which needs GPUs of capability {needs} or later, and these have {has}")
    if gpus.has_nvlink is False:
        _refuse("which goes over NVLink, and no two of these GPUs are connected by NVLink")


def require_one_machine(run: RunConfig, world: int, ranks_per_machine: int) -> None:
    """Raise CapabilityError for `model.ep_dispatch: deepep` if an expert-parallel group spans
    several machines. `world` processes fit the layout."""
    if run.model.ep_dispatch != "deepep":
        return
    for sharing in _ranks_that_share(run.train, world):
        machines = {rank // ranks_per_machine for rank in sharing}
        if len(machines) > 1:
            _refuse(
                f"which goes over NVLink, and train.expert_parallel_size: {len(sharing)} has "
                f"experts shared by ranks {', '.join(map(str, sharing))}, which are on "
                f"{len(machines)} machines of {ranks_per_machine} processes"
            )


def _refuse(reason: str) -> NoReturn:
    raise CapabilityError(
        f"model.ep_dispatch is deepep, {reason}.\n"
        "  Write model.ep_dispatch: alltoall, or leave it out."
    )


def _ranks_that_share(train: TrainConfig, world: int) -> Iterator[range]:
    """The expert-parallel groups of `device_mesh.Mesh.expert_mesh` for each pipeline stage."""
    stage, count = world // train.pipeline_parallel_size, train.expert_parallel_size
    groups = stage // count
    for first in range(0, world, stage):
        for number in range(groups):
            if train.ep_outside:
                yield range(first + number, first + stage, groups)
            else:
                yield range(first + number * count, first + (number + 1) * count)
