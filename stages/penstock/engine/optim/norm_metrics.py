"""Norms of gradients and of parameters, of all together and of each layer or type of layer, in any
layout.

One pass over what a rank holds and one sum over ranks give all of them: each number is divided by
how many ranks hold it, so that it counts once. L layers, by their names in the model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo

Detail = Literal["none", "total", "layers"]

_OF_MIXTURES = {"experts": "experts", "adapter": "experts", "gate": "router"}
"""Modules of a mixture of experts; `adapter` is the experts' where all of them share it."""

_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Norm:
    """One of all, and of each layer. Tensors are fp32 on the ranks' device, the same everywhere."""

    total: torch.Tensor
    layers_L: torch.Tensor  # noqa: N815 - L names the dimension


def norms_by_type(
    train: TrainConfig, held: Sequence[LocalParam], ranks: ProcessInfo
) -> "Norms | None":
    """Those of gradients by types of layers; None where the file asks for none. On every rank at
    once."""
    if train.log_grad_norm != "layers":
        return None
    train = train.model_copy(update={"log_param_norm": False})
    return Norms(train, held, ranks, named=norm_layer_type)


def build_norms(
    train: TrainConfig, held: Sequence[LocalParam], ranks: ProcessInfo
) -> "Norms | None":
    """None where nothing is told but the norm of all gradients. On every rank at once."""
    if train.log_grad_norm != "layers" and not train.log_param_norm:
        return None
    return Norms(train, [one for one in held if one.parameter.requires_grad], ranks)


class Norms:
    """What is told of the norms of a run's trained parameters."""

    def __init__(
        self,
        train: TrainConfig,
        trained: Sequence[LocalParam],
        ranks: ProcessInfo,
        *,
        named: Callable[[str], str] | None = None,
    ) -> None:
        """By layers, or by what parameters' names are `named`. On every rank at once."""
        named = named or norm_layer_name
        self.gradients = parse_norm_detail(train.log_grad_norm)
        self.parameters = parse_norm_detail(train.log_param_norm)
        self._ranks = ranks
        names: list[str] = []
        if "layers" in (self.gradients, self.parameters):
            # Stages of a pipeline hold different layers.
            everywhere = ranks.gather(sorted({named(one.name) for one in trained}))
            names = sorted({name for here in everywhere for name in here}, key=_in_order)
        self.names = names
        # Each number is counted by as many ranks as hold it, and goes to one layer: said once.
        self._parts = [(one, part) for one in trained for part in _parts_of(one)]
        copies = [part.copies for _, part in self._parts]
        places = [names.index(named(one.name)) if names else 0 for one, _ in self._parts]
        self._copies = torch.tensor(copies, dtype=torch.float64, device=ranks.device)
        self._places = torch.tensor(places, dtype=torch.int64, device=ranks.device)

    def of_gradients(self) -> Norm:
        """Of the gradients as they are now."""
        return self.of(lambda one: one.parameter.grad)

    def of_parameters(self) -> Norm:
        """Of the parameters as they are now."""
        return self.of(lambda one: one.parameter.detach())

    def told(self, gradients: Norm) -> dict[str, Any]:
        """What a step tells, after its update, besides the norm of all gradients."""
        found: dict[str, Any] = {}
        if self.gradients == "layers":
            found["grad_norms"] = self.by_name(gradients)
        if self.parameters != "none":
            norm = self.of_parameters()
            found["param_norm"] = norm.total.item()
            if self.parameters == "layers":
                found["param_norms"] = self.by_name(norm)
        return found

    def by_name(self, norm: Norm) -> Mapping[str, float]:
        """Each layer's."""
        return dict(zip(self.names, norm.layers_L.tolist(), strict=True))

    @torch.no_grad()
    def of(self, tensor_of: Callable[[LocalParam], torch.Tensor | None]) -> Norm:
        """Of a tensor of every parameter's layout, or none."""
        device, tensors, here = self._ranks.device, list[torch.Tensor](), list[int]()
        for at, (one, part) in enumerate(self._parts):
            tensor = tensor_of(one)
            if tensor is not None:
                tensors.append(part.of(local(tensor)))
                here.append(at)
        squares_L = torch.zeros(max(1, len(self.names)), dtype=torch.float64, device=device)
        if tensors:
            norms = [norm.to(device) for norm in torch._foreach_norm(tensors, 2, torch.float32)]
            counted, places = torch.stack(norms).double().square(), self._places
            if len(here) == len(self._parts):
                counted /= self._copies
            else:
                chosen = torch.tensor(here, device=device)
                counted, places = counted / self._copies[chosen], places[chosen]
            squares_L.index_add_(0, places, counted)
        squares_L = self._ranks.total(squares_L)
        return Norm(squares_L.sum().sqrt().float(), squares_L.sqrt().float())


@dataclass(frozen=True)
class _Part:
    """Some of a local tensor that as many ranks hold as one another."""

    piece: TensorShard | None
    """None: all of it."""
    copies: int

    def of(self, here: torch.Tensor) -> torch.Tensor:
        return here if self.piece is None else self.piece.of(here)


def parse_norm_detail(written: bool | Literal["layers"]) -> Detail:
    """What `log_grad_norm` and `log_param_norm` say."""
    if written == "layers":
        return "layers"
    return "total" if written else "none"


def norm_layer_name(name: str) -> str:
    """The layer that a parameter belongs to, or the module outside of layers: `layers.3`,
    `embed_tokens`, `norm`, `lm_head`."""
    if found := _LAYER.match(name):
        return f"layers.{found[1]}"
    return name.removeprefix("model.").partition(".")[0]


def norm_layer_type(name: str) -> str:
    """What kind of layer a parameter belongs to: `attention`, `feed_forward`, `experts`, `router`,
    `norm`, or the module outside of layers."""
    inner = _LAYER.sub("", name)
    if inner.startswith("self_attn."):
        return "attention"
    if inner.startswith("mlp."):
        module = inner.split(".")[1]
        return _OF_MIXTURES.get(module, "feed_forward")
    return "norm" if "norm" in inner else norm_layer_name(name)


def _in_order(name: str) -> tuple[int, int, str]:
    """As tokens pass: what comes before the layers, the layers by number, what comes after."""
    if name.startswith("layers."):
        return 1, int(name.partition(".")[2]), name
    return (0 if name.startswith("embed") else 3 if "head" in name else 2), 0, name


def _parts_of(one: LocalParam) -> list[_Part]:
    if one.copies is not None:
        return [_Part(None, one.copies)]
    return [_Part(piece, one.replicas * piece.copies) for piece in one.pieces]
