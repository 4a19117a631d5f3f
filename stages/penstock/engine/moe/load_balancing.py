"""A step's routers: losses for their balance, biases, and what is told of them.

All sums are over the tokens of the whole step, of all ranks and micro-batches and without padding,
and each token counts once: so nothing here depends on the layout. T tokens of a micro-batch on this
rank, R packed rows, E experts, L layers that have experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.device_mesh import ROWS, Mesh
from penstock.engine.distributed.parallel_model import ModelInputs
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.moe.balancing_settings import LoadBalancingConfig
from penstock.losses.load_balancing import (
    aux_loss_grad,
    entropy,
    imbalance,
    load_balancing_loss,
    update_expert_bias,
    z_loss,
)
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.layers.router_observer import AuxLossGradient, RouterStats
from penstock.models.names import SELECTION_BIAS
from penstock.rows.collate import MicroBatch

MOST_COUNTS = 1024
"""A step tells how many tokens each expert got where a model has up to so many experts in all."""

Observe = Callable[[Sequence[ModelInputs]], None]
"""Passes forward as in training, and no further."""


def build_routers(
    train: TrainConfig,
    config: DecoderConfig,
    parts: Sequence[Decoder],
    held: Sequence[LocalParam],
    mesh: Mesh,
    ranks: ProcessInfo,
) -> "Routers | None":
    """What the settings ask of a model's routers; None if nothing. On every rank at the same time.

    Raises ConfigError if something is asked and there are none.
    """
    balance = LoadBalancingConfig.of(train, config.experts)
    if balance is None or config.experts is None:
        return None
    return Routers(balance, config.experts, parts, held, mesh, ranks)


class Routers:
    """The routers of a run as one rank sees them: some layers', and some of each one's tokens."""

    def __init__(
        self,
        balance: LoadBalancingConfig,
        config: ExpertsConfig,
        parts: Sequence[Decoder],
        held: Sequence[LocalParam],
        mesh: Mesh,
        ranks: ProcessInfo,
    ) -> None:
        """`held` are the parts' parameters. Every rank must make one at the same time."""
        self._balance, self._config, self._ranks = balance, config, ranks
        self._at: dict[nn.Module, int] = {
            router: config.layers.index(layer)
            for part in parts
            for layer, router in part.routers().items()
        }
        self._biases = {
            place: one
            for place, layer in enumerate(config.layers)
            for one in held
            if one.name == f"model.layers.{layer}.mlp.gate.{SELECTION_BIAS}"
        }
        self._of_row = mesh.group("ring", "ulysses", "tensor")
        self._of_pass = mesh.group(*ROWS, "tensor")
        self._watches: list[RouterStatsCollector] = []

    def watching(
        self,
        calls: Sequence[ModelInputs],
        batches: Sequence[MicroBatch],
        tokens: int,
        context: ContextParallel,
        observe: Observe,
        *,
        scale: float = 1.0,
    ) -> list[ModelInputs]:
        """The calls of a step of `tokens` tokens, watched. What joins the loss is multiplied by
        `scale`, as the loss is.

        Losses of the whole step's balance need what all of its tokens choose before the first of
        them is learnt from. In a step of one pass ranks tell one another as it goes on; with more,
        all are passed through the model before, which costs a forward pass of each.
        """
        factor = scale / (max(1, tokens) * len(self._config.layers))
        load, z = self._balance.load * factor, self._balance.z * factor
        rows = [RowsHere.of(batch, context, self._ranks.device) for batch in batches]
        step = torch.tensor([tokens], device=self._ranks.device)

        def with_row(of: "RowsHere") -> PullOf:
            return lambda _, counts_RE: aux_loss_grad(_summed(counts_RE, self._of_row), of.tokens_R)

        def with_pass(_: nn.Module, counts_RE: torch.Tensor) -> torch.Tensor:
            counts_E = _summed(counts_RE.sum(0, keepdim=True), self._of_pass)
            return aux_loss_grad(counts_E, step)

        def with_step(router: nn.Module, _: torch.Tensor) -> torch.Tensor:
            return pulls_LE[self._at[router]][None]

        def watches(
            pull: Callable[["RowsHere"], PullOf | None], load: float, z: float
        ) -> list[ModelInputs]:
            self._watches = [RouterStatsCollector(one, pull(one), load, z) for one in rows]
            pairs = zip(calls, self._watches, strict=True)
            return [replace(call, watch=watch) for call, watch in pairs]

        if not load:
            return watches(lambda _: None, 0.0, z)
        if self._balance.over == "row":
            return watches(with_row, load, z)
        if len(calls) == 1:
            return watches(lambda _: with_pass, load, z)
        observe(watches(lambda _: None, 0.0, 0.0))
        counts_LE = self._totals()[:, : self._config.num_experts]
        pulls_LE = aux_loss_grad(counts_LE, step.expand(len(counts_LE)))
        return watches(lambda _: with_step, load, z)

    @torch.no_grad()
    def conclude(self, tokens: int) -> dict[str, Any]:
        """After the update of a step of `tokens` tokens: move the biases, and tell what there is to
        tell, the same on all ranks."""
        totals, experts = self._totals(), self._config.num_experts
        if self._balance.bias_rate:
            for place, held in self._biases.items():
                moves_E = update_expert_bias(totals[place, :experts], self._balance.bias_rate)
                for piece in held.pieces:
                    _cut(moves_E.view(piece.whole), piece.of(local(held.parameter)), piece.offsets)
        self._watches = []
        told: dict[str, Any] = {}
        sums = totals.cpu()
        over = max(1, tokens) * len(sums)
        if self._balance.load:
            told["aux_loss"] = sums[:, -2].sum().item() / over
        if self._balance.z:
            told["z_loss"] = sums[:, -1].sum().item() / over
        if self._balance.tells:
            told["routers"] = self._told(sums[:, :experts], sums[:, experts:-2])
        return told

    def _told(self, counts_LE: torch.Tensor, shares_LE: torch.Tensor) -> dict[str, list[Any]]:
        """One entry for each layer with experts, in every list."""
        found = {
            "layers": list(self._config.layers),
            "entropy": [round(entropy(shares_E), 6) for shares_E in shares_LE],
            "imbalance": [round(imbalance(counts_E), 6) for counts_E in counts_LE],
            "most": counts_LE.amax(1).long().tolist(),
            "least": counts_LE.amin(1).long().tolist(),
        }
        if counts_LE.numel() <= MOST_COUNTS:
            found["counts"] = counts_LE.long().tolist()
        return found

    def _totals(self) -> torch.Tensor:
        """What was seen in the step by layers: tokens of each expert, shares of each, and the two
        losses, undivided; fp64 [L, 2 E + 2], in which counts are exact."""
        experts = self._config.num_experts
        sums = torch.zeros(
            (len(self._config.layers), 2 * experts + 2),
            dtype=torch.float64,
            device=self._ranks.device,
        )
        for watch in self._watches:
            for router, noted in watch.noted.items():
                sums[self._at[router]] += noted
        return self._ranks.total(sums)


PullOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""A router, and how many of the tokens here chose each expert [R, E], to `losses.balance.pull_of`,
[R, E] or [1, E]."""


@dataclass(frozen=True)
class RowsHere:
    """Rows of a micro-batch, and those of their tokens that are this rank's."""

    row_T: torch.Tensor  # noqa: N815 - T names the dimension
    """The row of each token here, from 1; 0 for padding. int64."""
    tokens_R: torch.Tensor  # noqa: N815 - R names the dimension
    """Tokens of each row on all ranks that share it, int64."""

    @staticmethod
    def of(batch: MicroBatch, context: ContextParallel, device: torch.device) -> "RowsHere":
        """This rank's share, on the device."""
        sizes = torch.tensor([size for _, size in batch.rows], dtype=torch.int64)
        row_T = torch.zeros(sum(batch.lengths), dtype=torch.int64)
        used = torch.arange(1, len(sizes) + 1).repeat_interleave(sizes)
        row_T[: len(used)] = used
        mine_T = context.part(row_T).to(device, non_blocking=True)
        return RowsHere(mine_T, sizes.to(device, non_blocking=True))


class RouterStatsCollector:
    """Looks on during the passes of one micro-batch, and takes note of each router once."""

    def __init__(self, rows: RowsHere, pull: PullOf | None, load: float, z: float) -> None:
        """`load` and `z` are what the summed losses are multiplied by; without a `pull` there is no
        load-balancing loss."""
        self._rows, self._pull, self._load, self._z = rows, pull, load, z
        self._pulls: dict[nn.Module, torch.Tensor | None] = {}
        self.noted: dict[nn.Module, torch.Tensor] = {}
        """Of each router: tokens of each expert, shares of each, and both losses; fp64."""

    @property
    def row_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """As `Watch` has it."""
        return self._rows.row_T

    @property
    def num_rows(self) -> int:
        """As `Watch` has it."""
        return len(self._rows.tokens_R)

    @property
    def penalises(self) -> bool:
        """As `Watch` has it."""
        return bool(self._load or self._z)

    def looks_at(self, router: nn.Module) -> bool:
        """Without penalties, once."""
        return self.penalises or router not in self.noted

    def saw(self, router: nn.Module, seen: RouterStats) -> AuxLossGradient | None:
        """In a layer that is computed again the pull is what it was: nothing is asked twice."""
        if router not in self._pulls:
            counts_RE = seen.counts_RE
            self._pulls[router] = self._pull(router, counts_RE) if self._pull else None
        pull_RE, shares_RE = self._pulls[router], seen.shares_RE.detach()
        if pull_RE is None:
            pull_RE = torch.zeros_like(shares_RE)
        if router not in self.noted:
            load = load_balancing_loss(pull_RE, shares_RE)
            losses = torch.stack((load, z_loss(seen.squares_R.detach())))
            sums = (seen.counts_RE.sum(0), shares_RE.sum(0), losses)
            self.noted[router] = torch.cat([each.double() for each in sums])
        return AuxLossGradient(self._load * pull_RE, self._z) if self.penalises else None


def _summed(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None or not counts.numel():
        return counts
    total = counts.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _cut(whole: torch.Tensor, box: torch.Tensor, offsets: Sequence[int]) -> None:
    """Add to a box of a tensor what belongs there of `whole`."""
    for dim, (offset, size) in enumerate(zip(offsets, box.shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    box.add_(whole.to(box.device, box.dtype))
