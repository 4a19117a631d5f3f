"""One worker rank, started by torchrun: `python -m penstock.server.worker JOB`. Joins the process
group, builds the model, and serves commands."""

import faulthandler
import logging
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.config.server.config import ServerConfig, to_run_config
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.files import read_json_object
from penstock.core.process.die_with_parent import end_with_parent, outlive_parent_by
from penstock.core.sources.pin import pin_tokenizer
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.engine.losses.client_loss import PolicyForwardBackward
from penstock.engine.moe.routers import Routers
from penstock.engine.multi_lora.model_pool import ModelPool
from penstock.engine.multi_lora.model_store import build_model_store
from penstock.engine.multi_lora.shared_base import SharedBase, build_shared_base
from penstock.models.foundation import apply_overrides, check_foundation
from penstock.models.vision.types import read_vision
from penstock.rows.tokenizer import load_tokenizer
from penstock.server.images.expand import load_expander
from penstock.server.launch.job import ServerJob
from penstock.server.protocol.results import ServedModel
from penstock.server.protocol.threaded_channel import ThreadedEnd
from penstock.server.protocol.worker_commands import FromWorkers, Ready, ToWorkers, WorkerHeartbeat
from penstock.server.protocol.zmq_channel import listening
from penstock.server.weight_sync.allowed_hosts import LOOPBACK, allowed_hosts
from penstock.server.worker.batching import BatchDispatcher
from penstock.server.worker.generate import GenerationHandler
from penstock.server.worker.handlers import CommandHandlers
from penstock.server.worker.loop import serve
from penstock.server.worker.self_test import self_test


def build_handlers(
    substrate: SharedBase,
    *,
    base_model: str,
    tokenizer: TokenizerFiles,
    init_checkpoint: Path | None = None,
    allowed_hosts: Sequence[str] = LOOPBACK,
) -> CommandHandlers:
    """Collective. `base_model` is the model's name, `init_checkpoint` a checkpoint from which every
    new model is initialized, and `allowed_hosts` are the allowed hosts of weight sync."""
    built, ranks = substrate.built, substrate.ranks
    layout = built.engine.model
    models = ModelPool(substrate)
    reading = load_tokenizer(tokenizer.typed, tokenizer.source.pin.get("commit"))
    return CommandHandlers(
        models,
        build_model_store(models, base_model, tokenizer),
        PolicyForwardBackward(
            layout, ranks, built.sequence_logprobs.log_probs, built.engine.part(Routers)
        ),
        BatchDispatcher(
            substrate.run,
            num_replicas=built.dims.num_replicas,
            replica=layout.mesh.index("replicate", "shard"),
            pin_memory=ranks.device.type == "cuda",
        ),
        GenerationHandler(
            models,
            lambda tokens: str(reading.decode(list(tokens), skip_special_tokens=False)),
            stop_token_ids(substrate, reading),
        ),
        init_checkpoint,
        tuple(allowed_hosts),
    )


def stop_token_ids(substrate: SharedBase, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sequence tokens of the tokenizer, config.json, and generation_config.json."""
    file = substrate.weights / "generation_config.json" if substrate.weights else None
    configs = [substrate.hf_config, read_json_object(file) if file and file.is_file() else {}]
    token_ids: list[Any] = [tokenizer.eos_token_id]
    for config in configs:
        ends = config.get("eos_token_id")
        token_ids += ends if isinstance(ends, list) else [ends]
    return tuple(sorted({end for end in token_ids if isinstance(end, int)}))


MARGIN_SECONDS = 30.0
"""Seconds that collective timeouts exceed the scheduler's timeout for lost workers."""

TIED = (
    "the unembedding of this model is its embedding, which has no adapter: train_unembed has no"
    " effect"
)

log = logging.getLogger("penstock.server.worker")


def main(path: Path) -> None:
    """Serve the job in `path` until a Shutdown message or a failure."""
    end_with_parent()
    job = ServerJob.read(path)
    outlive_parent_by(job.config.stop_timeout)
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    logging.basicConfig(
        level=job.config.log_level if rank == 0 else logging.WARNING,
        format=f"%(asctime)s worker {rank} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    # A crash in CUDA or a kernel then leaves the Python stack in the log.
    faulthandler.enable()
    ranks = init_process_group(
        job.config.operation_timeout + MARGIN_SECONDS,
        reaches_out=bool(job.config.sync_allowed_hosts),
    )
    try:
        run_rank(job, ranks)
    except Exception:
        log.exception("rank %d failed", ranks.rank)
        raise
    destroy_process_group()


def run_rank(job: ServerJob, ranks: ProcessInfo) -> None:
    """Run one rank. Raises PenstockError for a model that cannot be served with these settings."""
    instance = uuid.uuid4().hex
    handlers = _operations(job, ranks)
    if job.config.enable_self_test:
        self_test(handlers)
        log.info("rank %d: the self test passed", ranks.rank)
    broadcast = ControlBroadcast(ranks, job.config.operation_timeout + MARGIN_SECONDS)
    substrate = handlers.models.substrate
    log.info("rank %d is ready, layout %s", ranks.rank, substrate.built.layout)
    if not ranks.is_main_process:
        serve(handlers, broadcast)
        return

    def ready() -> Ready:
        held = {name: handlers.models.get(name) for name in handlers.models.names}
        return Ready(
            instance=instance,
            served=served_by(job.config, job.tokenizer, substrate),
            models=tuple(held),
            steps={name: resident.step for name, resident in held.items()},
            models_with_gradients=tuple(
                name for name, resident in held.items() if resident.per is not None
            ),
            replicas=substrate.built.dims.num_replicas,
        )

    end: ThreadedEnd[FromWorkers, ToWorkers] = ThreadedEnd(
        lambda: listening(ToWorkers, job.workers_bind, env.workers_secret()),
        lambda: WorkerHeartbeat(instance=instance),
    )
    try:
        serve(handlers, broadcast, end, ready)
    finally:
        end.close()


def served_by(config: ServerConfig, tokenizer: str, substrate: SharedBase) -> ServedModel:
    """The model as reported to clients."""
    decoder, lora = substrate.built.config, substrate.run.lora
    return ServedModel(
        base_model=config.base_names[0],
        tokenizer=config.tokenizer_path or config.config_path or config.model_path or tokenizer,
        arch=substrate.family.model_type,
        max_context=decoder.max_position_embeddings,
        trains="adapters" if lora.enable_lora else "all weights",
        max_rank=lora.lora_rank if lora.enable_lora else 0,
        samples=True,
        vocab_size=decoder.vocab_size,
        image_token_id=substrate.vision.image_token_id if substrate.vision else None,
        notice=TIED if lora.enable_lora and substrate.has_tied_head else "",
    )


def _operations(job: ServerJob, ranks: ProcessInfo) -> CommandHandlers:
    config = job.config
    run = to_run_config(config)
    base = read_hf_config(job.config_path, {})
    check_foundation(base, run.model.foundation, loads_weights=bool(run.model.model_path))
    hf_config = apply_overrides(base, run.model.foundation)

    def notify(line: str) -> None:
        if ranks.is_main_process:
            log.info(line)

    if job.image_processor and ranks.is_main_process:
        _check_image_processor(job.image_processor, read_vision(hf_config).image_token_id)
    substrate = build_shared_base(run, hf_config, job.weights, ranks, notify)
    init_checkpoint = config.load_checkpoint_path
    return build_handlers(
        substrate,
        base_model=config.base_names[0],
        tokenizer=TokenizerFiles(job.tokenizer, pin_tokenizer(job.tokenizer)),
        init_checkpoint=Path(init_checkpoint).expanduser().resolve() if init_checkpoint else None,
        allowed_hosts=allowed_hosts(config.sync_allowed_hosts, requires_keys=job.requires_keys),
    )


def _check_image_processor(folder: str, image_token_id: int) -> None:
    """Raise ConfigError or CapabilityError unless images can be processed for this model."""
    token_id = load_expander(folder).processor.token_id
    if token_id != image_token_id:
        raise ConfigError(
            f"the image processor in {folder} writes token {token_id} for images, and the model's"
            f" config.json says {image_token_id}.\n  Write the tokenizer_path of the same model."
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
