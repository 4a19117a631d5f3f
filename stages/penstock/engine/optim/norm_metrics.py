"""Norm metrics: gradient and parameter norms, in total and by layer or layer type, in any layout.

One pass over a rank's parameters and one all-reduce give all of them: each element is divided by
the number of ranks that hold it, so that it counts once. L layers, by their names in the model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.step_part import StepPart, StepState
from penstock.models.names import LINEAR_ATTN, SELF_ATTN
from penstock_kernels.to_device import to_device

# Modules of an MoE layer; `adapter` is the adapter that all experts share.
_MOE_MODULES = {"experts": "experts", "adapter": "experts", "gate": "router"}

_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Norm:
    """A total norm and the norms of layers: fp32 on the ranks' device, the same on every rank."""

    total: torch.Tensor
    layers_L: torch.Tensor  # noqa: N815 - L names the dimension


def norms_by_type(
    train: TrainConfig, params: Sequence[LocalParam], ranks: ProcessInfo
) -> "Norms | None":
    """Gradient norms by layer type; None if the config asks for none. Collective."""
    if train.log_grad_norm != "layers":
        return None
    train = train.model_copy(update={"log_param_norm": False})
    return Norms(train, params, ranks, named=norm_layer_type)


def build_norms(
    train: TrainConfig, params: Sequence[LocalParam], ranks: ProcessInfo
) -> "Norms | None":
    """The norm metrics of a run; None if only the total gradient norm is logged. Collective."""
    if train.log_grad_norm != "layers" and not train.log_param_norm:
        return None
    return Norms(train, [param for param in params if param.parameter.requires_grad], ranks)


class Norms(StepPart):
    """Logs the norms of a run's trainable parameters."""

    def __init__(
        self,
        train: TrainConfig,
        trained: Sequence[LocalParam],
        ranks: ProcessInfo,
        *,
        named: Callable[[str], str] | None = None,
    ) -> None:
        """Group by layer, or by `named` of parameter names. Collective."""
        named = named or norm_layer_name
        self.gradients, self.parameters = train.log_grad_norm, train.log_param_norm
        self._ranks = ranks
        # As `gradient_norm` computed them; None with an optimizer in the backward pass.
        self._of_gradients: Norm | None = None
        names: list[str] = []
        if "layers" in (self.gradients, self.parameters):
            # Pipeline stages hold different layers.
            everywhere = ranks.all_gather(sorted({named(param.name) for param in trained}))
            names = sorted({*chain.from_iterable(everywhere)}, key=_model_order)
        self.names = names
        # Parts of parameters that are held by the same number of ranks each; None: all of it.
        self._parts: list[tuple[LocalParam, TensorShard | None]] = []
        # Computed once: the number of ranks that hold each element, and its layer.
        copies, layer_index = list[int](), list[int]()
        for param in trained:
            pieces = [(piece, param.num_replicas * piece.num_copies) for piece in param.shards]
            if param.num_copies is not None:
                pieces = [(None, param.num_copies)]
            for piece, num_copies in pieces:
                self._parts.append((param, piece))
                copies.append(num_copies)
                layer_index.append(names.index(named(param.name)) if names else 0)
        self._copies = torch.tensor(copies, dtype=torch.float64, device=ranks.device)
        self._places = torch.tensor(layer_index, dtype=torch.int64, device=ranks.device)

    def gradient_norm(self) -> torch.Tensor:
        """The total norm of the current gradients; keeps their norms for the metrics."""
        self._of_gradients = self.of(lambda param: param.parameter.grad)
        return self._of_gradients.total

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        """The logged norms after the update, except the total gradient norm."""
        del totals
        metrics: dict[str, Any] = {}
        if not step.is_finite:
            return metrics
        if self.gradients == "layers" and self._of_gradients:
            metrics["grad_norms"] = self.by_name(self._of_gradients)
        if self.parameters:
            norm = self.of(lambda param: param.parameter.detach())
            metrics["param_norm"] = norm.total.item()
            if self.parameters == "layers":
                metrics["param_norms"] = self.by_name(norm)
        return metrics

    def by_name(self, norm: Norm) -> Mapping[str, float]:
        return dict(zip(self.names, norm.layers_L.tolist(), strict=True))

    @torch.no_grad()
    def of(self, tensor_of: Callable[[LocalParam], torch.Tensor | None]) -> Norm:
        """Norms of one tensor, or None, per parameter, with the parameter's layout."""
        device, tensors, present = self._ranks.device, list[torch.Tensor](), list[int]()
        for index, (param, piece) in enumerate(self._parts):
            tensor = tensor_of(param)
            if tensor is not None:
                tensors.append(piece.view(local(tensor)) if piece else local(tensor))
                present.append(index)
        squares_L = torch.zeros(max(1, len(self.names)), dtype=torch.float64, device=device)
        if tensors:
            # Summed in fp32, of 16 bits too; those of offloaded parameters are on the host.
            norms = [norm.to(device) for norm in torch._foreach_norm(tensors, 2, torch.float32)]
            counted, layer_index = torch.stack(norms).double().square(), self._places
            if len(present) == len(self._parts):
                counted /= self._copies
            else:
                chosen = to_device(torch.tensor(present), device)
                counted, layer_index = counted / self._copies[chosen], layer_index[chosen]
            squares_L.index_add_(0, layer_index, counted)
        squares_L = self._ranks.all_reduce_sum(squares_L)
        return Norm(squares_L.sum().sqrt().float(), squares_L.sqrt().float())


def norm_layer_name(name: str) -> str:
    """The layer of a parameter, or the module outside layers: `layers.3`, `embed_tokens`, `norm`,
    `lm_head`."""
    if match := _LAYER.match(name):
        return f"layers.{match[1]}"
    return name.removeprefix("model.").partition(".")[0]


def norm_layer_type(name: str) -> str:
    """The layer type of a parameter: `attention`, `feed_forward`, `experts`, `router`, `norm`, or
    the module outside layers."""
    inner = _LAYER.sub("", name)
    if inner.startswith((f"{SELF_ATTN}.", f"{LINEAR_ATTN}.")):
        return "attention"
    if inner.startswith("mlp."):
        module = inner.split(".")[1]
        return _MOE_MODULES.get(module, "feed_forward")
    return "norm" if "norm" in inner else norm_layer_name(name)


def _model_order(name: str) -> tuple[int, int, str]:
    """Sort key: modules before the layers, layers by number, modules after."""
    if name.startswith("layers."):
        return 1, int(name.partition(".")[2]), name
    return (0 if name.startswith("embed") else 3 if "head" in name else 2), 0, name
