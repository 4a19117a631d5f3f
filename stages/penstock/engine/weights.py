"""Filling an empty, laid-out model: tensor by tensor, from safetensors or from a seed."""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.core.errors import CapabilityError
from penstock.engine.ranks import Ranks

Read = Callable[[str], torch.Tensor]
"""The whole tensor of a native parameter name, on the CPU."""


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = _files_by_tensor(folder)
        self._open: dict[Path, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file].get_tensor(name)

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name is there."""
        missing = [name for name in names if name not in self._files]
        if missing:
            raise CapabilityError(
                f"the checkpoint lacks {len(missing)} tensors that its config.json implies, first "
                f"{missing[0]}.\n"
                "  Check that model.model_path and model.config_path belong together."
            )


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        # Only the last part of a name counts: an index must not lead out of its folder.
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise CapabilityError(
            f"{folder} holds no model.safetensors and no index of shards.\n"
            "  Weights in other formats are not read; save them as safetensors first."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@torch.no_grad()
def fill(
    model: nn.Module,
    read: Read,
    *,
    readers: Literal["first_rank", "all_ranks"],
    ranks: Ranks,
) -> None:
    """Give every parameter its value from `read`, one tensor at a time.

    With `first_rank`, only rank 0 calls `read`, and each other rank receives its share.
    """
    for name, parameter in model.named_parameters():
        reads = readers == "all_ranks" or ranks.leads
        whole = read(name).to(parameter.dtype).contiguous() if reads else None
        if whole is not None and whole.shape != parameter.shape:
            raise CapabilityError(
                f"{name} is {tuple(whole.shape)} in the checkpoint, and the config makes it "
                f"{tuple(parameter.shape)}.\n  Check that the weights belong to this config.json."
            )
        _place(parameter, whole, readers, ranks)


def _place(parameter: torch.Tensor, whole: torch.Tensor | None, readers: str, ranks: Ranks) -> None:
    if isinstance(parameter, DTensor) or (readers == "first_rank" and ranks.world > 1):
        # Only what is sent to other ranks has to be on the device they talk through.
        if whole is None:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=ranks.device)
        whole = whole.to(ranks.device)
    assert whole is not None
    if isinstance(parameter, DTensor):
        source = 0 if readers == "first_rank" else None
        laid = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=source
        )
        parameter.to_local().copy_(laid.to_local())
        return
    if readers == "first_rank" and ranks.world > 1:
        dist.broadcast(whole, src=0)
    parameter.copy_(whole)
