"""MoE load balancing: auxiliary losses, bias updates, and router statistics of a step.

All sums are over the tokens of the whole step, over all ranks and micro-batches, without padding,
and each token counts once, so nothing depends on the layout. T tokens of a micro-batch on this
rank, R packed sequences, E experts, L MoE layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.device_mesh import DATA_AXES, Mesh
from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.moe.balancing_settings import LoadBalancingConfig, RoutedLayers
from penstock.engine.step_part import StepPart, StepState
from penstock.losses.load_balancing import (
    aux_loss_grad,
    entropy,
    imbalance,
    load_balancing_loss,
    update_expert_bias,
    z_loss,
)
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.router_observer import AuxLossGradient, RouterStats
from penstock.models.names import SELECTION_BIAS
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device

MAX_LOGGED_COUNTS = 1024
"""Token counts per expert are logged for models with up to so many experts in total."""


def build_routers(
    train: TrainConfig,
    config: DecoderConfig,
    parts: Sequence[CausalLM],
    params: Sequence[LocalParam],
    mesh: Mesh,
    ranks: ProcessInfo,
) -> "Routers | None":
    """The load balancing of a run; None if nothing is requested. Collective. Raises ConfigError if
    something is requested and the model has no routers."""
    routed = routed_layers(config)
    balance = LoadBalancingConfig.of(train, routed)
    if balance is None or routed is None:
        return None
    return Routers(balance, routed, parts, params, mesh, ranks)


def routed_layers(config: DecoderConfig) -> RoutedLayers | None:
    """The layers of a model with routers that are observed; None without any."""
    if isinstance(config, AutoModelConfig):
        outline = config.outline
        layers = tuple(outline.routers.values())
        return RoutedLayers(layers, outline.num_experts, outline.aux_loss_coef) if layers else None
    experts = config.experts
    if experts is None:
        return None
    return RoutedLayers(experts.layers, experts.num_experts, experts.aux_loss_coef)


class Routers(StepPart):
    """The routers of a run on one rank: those of some layers, with some of their tokens."""

    def __init__(
        self,
        balance: LoadBalancingConfig,
        config: RoutedLayers,
        parts: Sequence[CausalLM],
        params: Sequence[LocalParam],
        mesh: Mesh,
        ranks: ProcessInfo,
    ) -> None:
        self._balance, self._config, self._ranks = balance, config, ranks
        self._layer_index: dict[nn.Module, int] = {
            router: config.layers.index(layer)
            for part in parts
            for layer, router in part.routers().items()
        }
        self._biases = {
            layer_index: param
            for layer_index, layer in enumerate(config.layers)
            for param in params
            if param.name == f"model.layers.{layer}.mlp.gate.{SELECTION_BIAS}"
        }
        # Ranks that share out the tokens of each packed sequence.
        self._row_group = mesh.group("ring", "ulysses", "tensor")
        # Ranks of the tensor axis route different tokens.
        self._pass_group = mesh.group(*DATA_AXES, "tensor")
        self._collectors: list[RouterStatsCollector] = []

    @property
    def balances_rows(self) -> bool:
        """Whether a loss is computed of each packed sequence, which must then be in one pass."""
        return bool(self._balance.load) and self._balance.over == "row"

    def before_forward(self, step: StepState) -> None:
        """Observe the routers of the calls, which may run a forward pass of all of them."""
        self._ranks.heartbeat.set_phase("forward")
        step.calls = self.with_observers(
            step.model, step.calls, step.batches, step.counts.tokens, scale=step.scale
        )

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        del totals
        return self.finish_step(step.counts.tokens)

    def with_observers(
        self,
        model: ParallelModel,
        calls: Sequence[ModelInputs],
        batches: Sequence[MicroBatch],
        tokens: int,
        *,
        scale: float = 1.0,
    ) -> list[ModelInputs]:
        """The calls of a step of `tokens` tokens, with router observers. Auxiliary losses are
        multiplied by `scale`, like the loss.

        Balancing over the whole step needs the expert counts of all tokens before the first
        backward pass. In a step of one pass the ranks exchange counts during it; with more, all
        micro-batches run an extra forward pass first.
        """
        # Losses are means over tokens and layers.
        factor = scale / (max(1, tokens) * len(self._config.layers))
        load, z = self._balance.load * factor, self._balance.z * factor
        rows = [LocalRows.of(batch, model.context, self._ranks.device) for batch in batches]
        step = to_device(torch.tensor([tokens]), self._ranks.device)

        def with_row(of: "LocalRows") -> AuxLossGradFn:
            return lambda _, counts_RE: aux_loss_grad(
                _all_reduce(counts_RE, self._row_group), of.tokens_R
            )

        def with_pass(_: nn.Module, counts_RE: torch.Tensor) -> torch.Tensor:
            counts_E = _all_reduce(counts_RE.sum(0, keepdim=True), self._pass_group)
            return aux_loss_grad(counts_E, step)

        def with_step(router: nn.Module, _: torch.Tensor) -> torch.Tensor:
            return grads_LE[self._layer_index[router]][None]

        def build_observers(
            grad_fn: Callable[["LocalRows"], AuxLossGradFn | None], load: float, z: float
        ) -> list[ModelInputs]:
            self._collectors = [
                RouterStatsCollector(balancer, grad_fn(balancer), load, z) for balancer in rows
            ]
            pairs = zip(calls, self._collectors, strict=True)
            return [replace(call, router_observer=collector) for call, collector in pairs]

        if not load:
            return build_observers(lambda _: None, 0.0, z)
        if self._balance.over == "row":
            return build_observers(with_row, load, z)
        if len(calls) == 1:
            return build_observers(lambda _: with_pass, load, z)
        model.forward_for_observers(build_observers(lambda _: None, 0.0, 0.0))
        counts_LE = self._totals()[:, : self._config.num_experts]
        grads_LE = aux_loss_grad(counts_LE, step.expand(len(counts_LE)))
        return build_observers(lambda _: with_step, load, z)

    @torch.no_grad()
    def finish_step(self, tokens: int) -> dict[str, Any]:
        """Update the biases, after the optimizer step, and return the metrics of a step of
        `tokens` tokens, the same on all ranks."""
        totals, experts = self._totals(), self._config.num_experts
        if self._balance.bias_rate:
            for layer_index, local_param in self._biases.items():
                # Of totals over all ranks: the copies of a bias move alike without communication.
                moves_E = update_expert_bias(totals[layer_index, :experts], self._balance.bias_rate)
                for piece in local_param.shards:
                    box = piece.view(local(local_param.parameter))
                    moves = piece.within(moves_E.view(piece.full_shape))
                    box.add_(moves.to(box.device, box.dtype))
        self._collectors = []
        metrics: dict[str, Any] = {}
        # One copy: each number that is read below would wait for the device.
        sums = totals.cpu()
        over = max(1, tokens) * len(sums)
        if self._balance.load:
            metrics["aux_loss"] = sums[:, -2].sum().item() / over
        if self._balance.z:
            metrics["z_loss"] = sums[:, -1].sum().item() / over
        if self._balance.log_stats:
            metrics["routers"] = self._metrics(sums[:, :experts], sums[:, experts:-2])
        return metrics

    def _metrics(self, counts_LE: torch.Tensor, shares_LE: torch.Tensor) -> dict[str, list[Any]]:
        metrics = {
            "layers": list(self._config.layers),
            "entropy": [round(entropy(shares_E), 6) for shares_E in shares_LE],
            "imbalance": [round(imbalance(counts_E), 6) for counts_E in counts_LE],
            "most": counts_LE.amax(1).long().tolist(),
            "least": counts_LE.amin(1).long().tolist(),
        }
        if counts_LE.numel() <= MAX_LOGGED_COUNTS:
            metrics["counts"] = counts_LE.long().tolist()
        return metrics

    def _totals(self) -> torch.Tensor:
        """The router statistics of the step by layer, summed over ranks: token counts and
        probability sums of each expert, and the two losses, undivided; fp64 [L, 2 E + 2]."""
        shape = len(self._config.layers), 2 * self._config.num_experts + 2
        # fp64, in which counts are exact.
        sums = torch.zeros(shape, dtype=torch.float64, device=self._ranks.device)
        for collector in self._collectors:
            for router, statistics in collector.statistics.items():
                sums[self._layer_index[router]] += statistics
        return self._ranks.all_reduce_sum(sums)


AuxLossGradFn = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""Function from a router and this rank's token counts per expert [R, E] to
`losses.load_balancing.aux_loss_grad`, [R, E] or [1, E].
"""


@dataclass(frozen=True)
class LocalRows:
    """The packed sequences of a micro-batch, and the tokens of them on this rank."""

    row_T: torch.Tensor  # noqa: N815 - T names the dimension
    """The packed sequence of each local token, from 1; 0 for padding. int64."""
    tokens_R: torch.Tensor  # noqa: N815 - R names the dimension
    """Tokens of each packed sequence on all ranks that share it, int64."""

    @staticmethod
    def of(batch: MicroBatch, context: ContextParallel, device: torch.device) -> "LocalRows":
        sizes = torch.tensor([size for _, size in batch.rows], dtype=torch.int64)
        row_T = torch.zeros(sum(batch.lengths), dtype=torch.int64)
        used = torch.arange(1, len(sizes) + 1).repeat_interleave(sizes)
        row_T[: len(used)] = used
        return LocalRows(to_device(context.shard_tensor(row_T), device), to_device(sizes, device))


class RouterStatsCollector:
    """Observes the routers during the passes of one micro-batch, and records each router once."""

    def __init__(
        self, rows: LocalRows, grad_fn: AuxLossGradFn | None, load: float, z: float
    ) -> None:
        # `load` and `z` are loss coefficients; no load-balancing loss without a `grad_fn`.
        self._rows, self._grad_fn, self._load, self._z = rows, grad_fn, load, z
        self._grads: dict[nn.Module, torch.Tensor | None] = {}
        self.statistics: dict[nn.Module, torch.Tensor] = {}
        """For each router: token counts and probability sums of each expert, and both losses;
        fp64.
        """

    @property
    def row_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        return self._rows.row_T

    @property
    def num_rows(self) -> int:
        return len(self._rows.tokens_R)

    @property
    def has_aux_loss(self) -> bool:
        return bool(self._load or self._z)

    def observes_pass(self, router: nn.Module) -> bool:
        """Every time with auxiliary losses, otherwise once."""
        return self.has_aux_loss or router not in self.statistics

    def observe(self, router: nn.Module, stats: RouterStats) -> AuxLossGradient | None:
        """Record a router's statistics and return the gradient of the auxiliary loss.

        In a recomputed layer the gradient is reused, so ranks communicate only once.
        """
        if router not in self._grads:
            counts_RE = stats.counts_RE
            self._grads[router] = self._grad_fn(router, counts_RE) if self._grad_fn else None
        grad_RE, shares_RE = self._grads[router], stats.shares_RE.detach()
        if grad_RE is None:
            grad_RE = torch.zeros_like(shares_RE)
        if router not in self.statistics:
            load = load_balancing_loss(grad_RE, shares_RE)
            losses = torch.stack((load, z_loss(stats.squares_R.detach())))
            sums = (stats.counts_RE.sum(0), shares_RE.sum(0), losses)
            # fp64 holds every count; fp32 holds those up to 2^24.
            self.statistics[router] = torch.cat([part.double() for part in sums])
        return AuxLossGradient(self._load * grad_RE, self._z) if self.has_aux_loss else None


def _all_reduce(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    # Ranks that share packed sequences have equally many: all of them skip an empty all-reduce.
    if group is None or not counts.numel():
        return counts
    # A copy: the statistics are sums of this rank's own counts.
    total = counts.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
