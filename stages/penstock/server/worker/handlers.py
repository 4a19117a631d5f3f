"""Command handlers, run on every rank. Only rank 0's results are sent."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from penstock.engine.losses.client_loss import PolicyForwardBackward
from penstock.engine.model_source import LoraArgs
from penstock.engine.multi_lora.model_pool import KINDS, LoraSpec, ModelPool
from penstock.engine.multi_lora.model_store import ModelStore
from penstock.engine.multi_lora.optim_step import AdamParams, step
from penstock.server.protocol import worker_commands as commands
from penstock.server.protocol.requests import OptimStep, ZeroGrad
from penstock.server.protocol.results import (
    Done,
    ForwardBackwardResult,
    OptimStepResult,
    SyncWeightsResult,
)
from penstock.server.protocol.types import Array, LoraConfig
from penstock.server.weight_sync.allowed_hosts import LOOPBACK
from penstock.server.weight_sync.sender import RankModelView, sync_weights
from penstock.server.worker.batching import BatchDispatcher
from penstock.server.worker.datums import (
    build_client_loss,
    build_outputs,
    build_samples,
    router_metrics,
)
from penstock.server.worker.errors import CommandError
from penstock.server.worker.generate import GenerationHandler, RunningGeneration


@dataclass(frozen=True)
class CommandHandlers:
    """The clients' models on these ranks."""

    models: ModelPool
    model_store: ModelStore
    losses: PolicyForwardBackward
    dispatcher: BatchDispatcher
    sampling: GenerationHandler
    init_checkpoint: Path | None = None  # A checkpoint from which every new model is initialized

    allowed_hosts: tuple[str, ...] = LOOPBACK  # Allowed hosts of weight sync

    def do(self, command: commands.WorkerOperation) -> commands.Result:
        """Run a command. Collective. Raises PenstockError; only what that says has then changed."""
        if not isinstance(command, commands.GenerateCommand):
            self.sampling.release_cache()
        try:
            return self._run(command) or Done()
        finally:
            # Also after an error: the next pass, of any client, would add to the gradients of this
            # one.
            self.models.zero_grad()

    @contextmanager
    def generating(self, command: commands.GenerateCommand) -> Iterator[RunningGeneration]:
        """Run a GenerateCommand, which others may join. Collective. Raises PenstockError."""
        try:
            with self.sampling.running(command) as generation:
                yield generation
        finally:
            self.models.zero_grad()

    def _run(self, command: commands.WorkerOperation) -> commands.Result | None:
        match command:
            case commands.CreateModelCommand():
                return self._create_model(command)
            case commands.UnloadModelCommand():
                self.models.close(command.model)
            case commands.ForwardBackwardCommand():
                return self._forward_backward(command)
            case OptimStep():
                adam = AdamParams(**structs.asdict(command.adam))
                return OptimStepResult(metrics=step(self.models, command.model, adam))
            case ZeroGrad():
                self.models.get(command.model).zero_grad()
            case commands.SaveCheckpointCommand():
                self.model_store.save(command.model, Path(command.folder), command.metadata)
            case commands.LoadCheckpointCommand():
                folder = Path(command.folder)
                if not folder.is_dir():
                    raise CommandError(
                        "not_found", f"there is no checkpoint {folder.name}.\n  Save first."
                    )
                self.model_store.load(command.model, folder, optimizer=command.optimizer)
            case commands.ExportCommand():
                self.model_store.export(command.model, Path(command.folder), command.dtype)
            case commands.GenerateCommand():
                with self.sampling.running(command) as generation:
                    return generation.result_of(command)
            case commands.WeightSyncCommand():
                return self._sync_weights(command)
        return None

    def _create_model(self, command: commands.CreateModelCommand) -> commands.CheckpointSizes:
        config, optimizer = command.optimizer_config, dict[str, Any]()
        if config.kind is not None:
            optimizer["optimizer"] = config.kind
        if config.dtype is not None:
            optimizer["optimizer_dtype"] = config.dtype
        if config.kind is not None or config.kwargs:
            optimizer["optimizer_kwargs"] = dict(config.kwargs)
        self.models.open(command.model, self._build_lora_spec(command.lora), optimizer)
        try:
            if self.init_checkpoint:
                self.model_store.init_from(command.model, self.init_checkpoint)
            sizes = self.model_store.sizes(command.model)
        # The scheduler takes a failed creation for one that changed nothing.
        except BaseException:
            self.models.close(command.model)
            raise
        return commands.CheckpointSizes(state_bytes=sizes.state, export_bytes=sizes.export)

    def _build_lora_spec(self, lora: LoraConfig | None) -> LoraSpec | None:
        """The requested LoRA config, completed from the server config."""
        substrate = self.models.substrate
        run_lora = substrate.run.lora
        if not run_lora.enable_lora:
            if lora is not None:
                raise CommandError(
                    "invalid",
                    f"an adapter of rank {lora.rank} is requested, and this server trains all "
                    "weights.\n  Create the model without lora_config, or serve with enable_lora.",
                )
            return None
        lora = lora or LoraConfig(rank=run_lora.lora_rank)
        available_kinds = self.models.kinds
        requested = {kind: getattr(lora, f"train_{kind}") for kind in KINDS}
        if requested["unembed"] and substrate.has_tied_head:
            # The SDK's default is True; Served.notice says how that is handled.
            requested["unembed"] = None
        return LoraSpec(
            rank=lora.rank,
            alpha=run_lora.lora_alpha if lora.alpha is None else lora.alpha,
            seed=substrate.run.train.seed if lora.seed is None else lora.seed,
            kinds=frozenset(
                kind
                for kind in KINDS
                if (kind in available_kinds if requested[kind] is None else requested[kind])
            ),
        )

    def _forward_backward(self, command: commands.ForwardBackwardCommand) -> ForwardBackwardResult:
        resident, loss = self.models.get(command.model), build_client_loss(command)
        substrate = self.models.substrate
        samples = build_samples(command, substrate.built.vocab_size)
        if not command.forward_only and resident.per not in (None, command.loss_reduction):
            raise CommandError(
                "invalid",
                f"the accumulated gradients are of losses per {resident.per}, and those of this"
                f" pass would be per {command.loss_reduction}.\n"
                "  Step first, or drop the gradients.",
            )
        started = time.monotonic()
        batches = self.dispatcher.build_micro_batches(samples, command.rows)
        num_tokens = sum(len(sample.tokens) for sample in samples)
        num_trained = sum(sample.num_trained for sample in samples)
        self.models.activate(command.model)
        extra_metrics: dict[str, float] = {}
        if command.forward_only:
            logp = self.losses.forward(batches, num_tokens)
        else:
            logp, metrics = self.losses.forward_backward(batches, loss, num_tokens)
            self.models.accumulate_grads(resident, num_trained, command.loss_reduction)
            extra_metrics = router_metrics(metrics) | self.models.grad_norms(resident)
        outputs, total = build_outputs(samples, loss, logp.cpu())
        return ForwardBackwardResult(
            outputs=tuple(
                {name: Array.of(numbers, "float32") for name, numbers in output.items()}
                for output in outputs
            ),
            metrics={
                "loss:sum": total,
                "loss:mean": total / max(1, num_trained),
                "valid_tokens:sum": float(num_trained),
                "tokens:sum": float(num_tokens),
                "execution_time:sum": time.monotonic() - started,
                **extra_metrics,
            },
        )

    def _sync_weights(self, command: commands.WeightSyncCommand) -> SyncWeightsResult | None:
        # Only rank 0 has a result.
        resident = self.models.activate(command.model)
        substrate, adapter = self.models.substrate, resident.adapter
        live = RankModelView(
            params=substrate.params,
            names=substrate.names,
            roles=substrate.family.roles,
            adapting=LoraArgs(adapter.alpha) if adapter else None,
            rank=adapter.rank if adapter else None,
            formats=substrate.formats,
            multimodal=substrate.base if substrate.vision else None,
        )
        return sync_weights(command, live, substrate.ranks, allowed=self.allowed_hosts)
