"""Command handlers, run on every rank. Only rank 0's results are sent."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.losses.client_loss import PolicyForwardBackward
from penstock.engine.model_source import LoraArgs
from penstock.engine.multi_lora.model_pool import KINDS, LoraSpec, ModelPool
from penstock.engine.multi_lora.model_store import ModelStore
from penstock.engine.multi_lora.optim_step import AdamParams, step
from penstock.server.protocol.requests import OptimStep, ZeroGrad
from penstock.server.protocol.results import (
    Done,
    ForwardBackwardResult,
    OptimStepResult,
    SyncWeightsResult,
)
from penstock.server.protocol.types import Array, LoraConfig
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    CreateModelCommand,
    ExportCommand,
    ForwardBackwardCommand,
    GenerateCommand,
    GenerateResult,
    LoadCheckpointCommand,
    SaveCheckpointCommand,
    UnloadModelCommand,
    WeightSyncCommand,
    WorkerOperation,
)
from penstock.server.weight_sync.allowed_hosts import LOOPBACK
from penstock.server.weight_sync.sender import RankModelView, push
from penstock.server.worker.batching import BatchDispatcher
from penstock.server.worker.datums import (
    build_client_loss,
    build_outputs,
    build_samples,
    told_numbers,
)
from penstock.server.worker.errors import CommandError
from penstock.server.worker.generate import GenerationHandler

Result = (
    Done
    | CheckpointSizes
    | ForwardBackwardResult
    | OptimStepResult
    | GenerateResult
    | SyncWeightsResult
)


@dataclass(frozen=True)
class CommandHandlers:
    """The clients' models on these ranks."""

    residents: ModelPool
    resting: ModelStore
    losses: PolicyForwardBackward
    dealing: BatchDispatcher
    sampling: GenerationHandler
    begin_from: Path | None = None
    """A checkpoint from which every new model is initialized."""

    allowed_hosts: tuple[str, ...] = LOOPBACK
    """Allowed hosts of weight sync."""

    def do(self, order: WorkerOperation) -> Result:
        """Run a command. Collective.

        Raises PenstockError if it fails; nothing has then changed, except as the error says.
        """
        act: Callable[[Any], Result] = {
            CreateModelCommand: self._open,
            UnloadModelCommand: self._close,
            ForwardBackwardCommand: self._rows,
            OptimStep: self._update,
            ZeroGrad: self._forget,
            SaveCheckpointCommand: self._save,
            LoadCheckpointCommand: self._load,
            ExportCommand: self._export,
            GenerateCommand: self.sampling.generate,
            WeightSyncCommand: self._push,
        }[type(order)]
        try:
            return act(order)
        finally:
            self.residents.zero_grad()

    def _open(self, order: CreateModelCommand) -> CheckpointSizes:
        asked, optimizer = order.optimizer_config, dict[str, Any]()
        if asked.kind is not None:
            optimizer["optimizer"] = asked.kind
        if asked.dtype is not None:
            optimizer["optimizer_dtype"] = asked.dtype
        if asked.kind is not None or asked.kwargs:
            optimizer["optimizer_kwargs"] = dict(asked.kwargs)
        self.residents.open(order.model, self._adapter(order.lora), optimizer)
        try:
            if self.begin_from:
                self.resting.init_from(order.model, self.begin_from)
            sizes = self.resting.sizes(order.model)
        except BaseException:
            self.residents.close(order.model)
            raise
        return CheckpointSizes(state_bytes=sizes.state, export_bytes=sizes.export)

    def _adapter(self, lora: LoraConfig | None) -> LoraSpec | None:
        """The requested LoRA config, completed from the server config."""
        substrate = self.residents.substrate
        said = substrate.run.lora
        if not said.enable_lora:
            if lora is not None:
                raise CommandError(
                    "invalid",
                    f"an adapter of rank {lora.rank} is asked for, and this server trains all "
                    "weights.\n  Create the model without lora_config, or serve with enable_lora.",
                )
            return None
        lora = lora or LoraConfig(rank=said.lora_rank)
        there = self.residents.kinds
        asked = {kind: getattr(lora, f"train_{kind}") for kind in KINDS}
        if asked["unembed"] and substrate.has_tied_head:
            # The SDK's default is True; Served.notice says how that is handled.
            asked["unembed"] = None
        return LoraSpec(
            rank=lora.rank,
            alpha=said.lora_alpha if lora.alpha is None else lora.alpha,
            seed=substrate.run.train.seed if lora.seed is None else lora.seed,
            kinds=frozenset(
                kind for kind in KINDS if (kind in there if asked[kind] is None else asked[kind])
            ),
        )

    def _close(self, order: UnloadModelCommand) -> Done:
        self.residents.close(order.model)
        return Done()

    def _rows(self, order: ForwardBackwardCommand) -> ForwardBackwardResult:
        resident, loss = self.residents.get(order.model), build_client_loss(order)
        substrate = self.residents.substrate
        samples = build_samples(order, substrate.built.vocab_size)
        if not order.forward_only and resident.per not in (None, order.loss_reduction):
            raise CommandError(
                "invalid",
                f"the accumulated gradients are of losses per {resident.per}, and those of this pass"
                f" would be per {order.loss_reduction}.\n  Step first, or drop the gradients.",
            )
        began = time.monotonic()
        batches = self.dealing.deal(samples, order.rows)
        num_tokens = sum(len(sample.tokens) for sample in samples)
        num_trained = sum(sample.num_trained for sample in samples)
        self.residents.activate(order.model)
        more: dict[str, float] = {}
        if order.forward_only:
            logp = self.losses.forward(batches, num_tokens)
        else:
            logp, told = self.losses.forward_backward(batches, loss, num_tokens)
            self.residents.accumulate_grads(resident, num_trained, order.loss_reduction)
            more = told_numbers(told) | self.residents.grad_norms(resident)
        outputs, total = build_outputs(samples, loss, logp.cpu())
        return ForwardBackwardResult(
            outputs=tuple(
                {name: Array.of(its, "float32") for name, its in each.items()} for each in outputs
            ),
            metrics={
                "loss:sum": total,
                "loss:mean": total / max(1, num_trained),
                "valid_tokens:sum": float(num_trained),
                "tokens:sum": float(num_tokens),
                "execution_time:sum": time.monotonic() - began,
                **more,
            },
        )

    def _update(self, order: OptimStep) -> OptimStepResult:
        adam = order.adam
        numbers = AdamParams(
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        return OptimStepResult(metrics=step(self.residents, order.model, numbers))

    def _forget(self, order: ZeroGrad) -> Done:
        self.residents.get(order.model).zero_grad()
        return Done()

    def _save(self, order: SaveCheckpointCommand) -> Done:
        self.resting.save(order.model, Path(order.folder), order.metadata)
        return Done()

    def _load(self, order: LoadCheckpointCommand) -> Done:
        folder = Path(order.folder)
        if not folder.is_dir():
            raise CommandError("not_found", f"there is no checkpoint {folder.name}.\n  Save first.")
        self.resting.load(order.model, folder, optimizer=order.optimizer)
        return Done()

    def _export(self, order: ExportCommand) -> Done:
        self.resting.export(order.model, Path(order.folder), order.dtype)
        return Done()

    def _push(self, order: WeightSyncCommand) -> SyncWeightsResult | Done:
        """Only rank 0 has a result."""
        resident = self.residents.activate(order.model)
        substrate, adapter = self.residents.substrate, resident.adapter
        live = RankModelView(
            held=substrate.built.engine.layout.params,
            names=substrate.names,
            roles=substrate.family.roles,
            adapting=LoraArgs(adapter.alpha) if adapter else None,
            rank=adapter.rank if adapter else None,
            formats=substrate.formats,
        )
        return push(order, live, substrate.ranks, allowed=self.allowed_hosts) or Done()
