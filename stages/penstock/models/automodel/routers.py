"""Routers of transformers models, and what they report to the current `RouterObserver`.

A router is a module of the class that the model records as `router_logits`. It returns logits, the
weights of a token's experts and their numbers. T tokens, R packed rows, E experts, K experts per
token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.models.automodel.outline import Scoring
from penstock.models.layers.router import AddAuxLoss
from penstock.models.layers.router_observer import (
    AuxLossGradient,
    RouterObserver,
    RouterStats,
    current_observer,
)
from penstock_kernels.route import route_stats, score_shares

TOLERANCE = 1e-3


def router_modules(model: Any) -> dict[str, nn.Module]:
    """The routers by name; none if the model does not say what its routers are."""
    # Private: what transformers (5.23) itself reads where `output_router_logits` is asked for.
    declared = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = declared.get("router_logits")
    if recorder is None or isinstance(recorder, list) or recorder.index != 0:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    }


def infer_scoring(output: Any, tokens: int, num_experts: int) -> Scoring | None:
    """The function from the logits to the weights that a router returned for these tokens, up to a
    factor for each token; None if it is not known."""
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, weights, choice = output
    if choice.is_floating_point() or logits.shape != (tokens, num_experts):
        return None
    # With one expert per token its normalized weight is 1 under either function.
    if choice.shape != weights.shape or choice.shape[-1] < 2:
        return None
    weights_TK = weights.double() / weights.double().sum(-1, keepdim=True)
    scorings: tuple[Scoring, ...] = ("softmax", "sigmoid")
    for scoring in scorings:
        chosen_TK = score_shares(logits.double(), scoring).gather(1, choice)
        chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        if torch.allclose(chosen_TK, weights_TK, rtol=TOLERANCE):
            return scoring
    return None


def observe_router(module: nn.Module, scoring: Scoring) -> None:
    """Report every pass of a router to the observer that is then current."""

    def report(router: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> Any:
        observer = current_observer()
        if observer is None or not observer.observes_pass(router):
            return None
        logits_TE, weights_TK, choice_TK = output
        # In fp32 outside of autocast, as the routers of native models.
        device = logits_TE.device.type
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and observer.has_aux_loss),
            torch.autocast(device, enabled=False),
        ):
            tokens = logits_TE.float(), choice_TK, observer.row_T
            sums = route_stats(*tokens, observer.num_rows, scoring=scoring)
            stats = RouterStats(*sums)
            grad = observer.observe(router, stats)
            if grad is None:
                return None
            aux_loss = grad.inner_product(stats)
        return logits_TE, AddAuxLoss.apply(weights_TK, aux_loss), choice_TK

    module.register_forward_hook(report)


class PaddedObserver:
    """An observer of the routers of a padded batch, in which padding belongs to no row."""

    def __init__(self, observer: RouterObserver, here_BL: torch.Tensor) -> None:
        """`here_BL` is true where the batch has a token."""
        self._observer = observer
        row_T = observer.row_T
        self._row_T = row_T.new_zeros(here_BL.shape).masked_scatter(here_BL, row_T).flatten()

    @property
    def row_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """See `RouterObserver`, of B * L tokens."""
        return self._row_T

    @property
    def num_rows(self) -> int:
        return self._observer.num_rows

    @property
    def has_aux_loss(self) -> bool:
        return self._observer.has_aux_loss

    def observes_pass(self, router: nn.Module) -> bool:
        return self._observer.observes_pass(router)

    def observe(self, router: nn.Module, stats: RouterStats) -> AuxLossGradient | None:
        return self._observer.observe(router, stats)


def layer_indices(routers: Mapping[str, nn.Module], layers: tuple[str, ...]) -> dict[str, int]:
    """The number of each router's layer; nothing unless each has a layer of its own."""
    indices = {
        router: number
        for router in routers
        for number, layer in enumerate(layers)
        if router.startswith(f"{layer}.")
    }
    return indices if len({*indices.values()}) == len(routers) else {}
