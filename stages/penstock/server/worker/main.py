"""One rank of the workers: joins the others, assembles the model, and serves the engine."""

import faulthandler
import logging
import sys
import uuid
from pathlib import Path

from penstock.config.server import ServerConfig, run_of
from penstock.core import env
from penstock.core.orphan import end_with_parent, outlive_parent_by
from penstock.core.source import pin_tokenizer
from penstock.engine.announcing import Announcing
from penstock.engine.hf_config import read_hf_config
from penstock.engine.hf_tokenizer import TokenizerFiles
from penstock.engine.ranks import Ranks, join, leave
from penstock.engine.substrate import Substrate, substrate_of
from penstock.models.foundation import check_foundation, laid_over
from penstock.server.job import ServerJob
from penstock.server.protocol.channel import Channel
from penstock.server.protocol.commands import Beat, FromWorkers, Ready, ToWorkers
from penstock.server.protocol.results import Served
from penstock.server.protocol.threaded import ThreadedEnd
from penstock.server.protocol.zmq import listening
from penstock.server.sync.hosts import allowed_hosts
from penstock.server.worker.assembling import operations_on
from penstock.server.worker.operations import Operations
from penstock.server.worker.self_test import self_test
from penstock.server.worker.serving import Running, serve

MARGIN_SECONDS = 30.0
"""Collective operations wait so much longer than the engine, which takes the workers for lost."""

TIED = (
    "the unembedding of this model is its embedding, which bears no adapter: train_unembed changes "
    "nothing"
)

log = logging.getLogger("penstock.server.worker")


def main(path: Path) -> None:
    """Serve the job in `path` until the engine says to end, or this process fails."""
    end_with_parent()
    job = ServerJob.read(path)
    outlive_parent_by(job.config.stop_timeout)
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    _log_to(job, rank)
    faulthandler.enable()
    ranks = join(
        job.config.operation_timeout + MARGIN_SECONDS,
        reaches_out=bool(job.config.sync_allowed_hosts),
    )
    try:
        run_rank(job, ranks)
    except Exception:
        log.exception("rank %d failed", ranks.rank)
        raise
    leave()


def run_rank(job: ServerJob, ranks: Ranks) -> None:
    """Be one rank. Raises PenstockError for a model that cannot be served as the settings say."""
    instance = uuid.uuid4().hex
    operations = _operations(job, ranks)
    if job.config.enable_self_test:
        self_test(operations)
        log.info("rank %d: the self test went well", ranks.rank)
    announcing = Announcing(ranks, job.config.operation_timeout + MARGIN_SECONDS)
    substrate = operations.residents.substrate
    log.info("rank %d is ready, layout %s", ranks.rank, substrate.built.layout)
    if not ranks.leads:
        serve(operations, announcing)
        return
    running = Running()

    def begin() -> Channel[FromWorkers, ToWorkers]:
        return listening(ToWorkers, job.workers_bind, env.workers_secret())

    def ready() -> Ready:
        held = {name: operations.residents.get(name) for name in operations.residents.names}
        return Ready(
            instance=instance,
            served=served_by(job.config, job.tokenizer, substrate),
            models=tuple(held),
            steps={name: resident.step for name, resident in held.items()},
            gathering=tuple(name for name, resident in held.items() if resident.per is not None),
            replicas=substrate.built.degrees.num_replicas,
        )

    end: ThreadedEnd[FromWorkers, ToWorkers] = ThreadedEnd(
        begin, lambda: Beat(instance=instance, running=running.id)
    )
    try:
        serve(operations, announcing, end, ready, running)
    finally:
        end.close()


def served_by(config: ServerConfig, tokenizer: str, substrate: Substrate) -> Served:
    """What clients are told of the model."""
    decoder, lora = substrate.built.config, substrate.run.lora
    return Served(
        base_model=config.base_names[0],
        tokenizer=config.tokenizer_path or config.config_path or config.model_path or tokenizer,
        arch=substrate.family.model_type,
        max_context=decoder.max_position_embeddings,
        trains="adapters" if lora.enable_lora else "all weights",
        max_rank=lora.lora_rank if lora.enable_lora else 0,
        samples=True,
        vocab_size=decoder.vocab_size,
        notice=TIED if lora.enable_lora and substrate.has_tied_head else "",
    )


def _operations(job: ServerJob, ranks: Ranks) -> Operations:
    config = job.config
    run = run_of(config)
    base = read_hf_config(job.config_path, {})
    check_foundation(base, run.model.foundation, loads_weights=bool(run.model.model_path))
    hf_config = laid_over(base, run.model.foundation)

    def notify(line: str) -> None:
        if ranks.leads:
            log.info(line)

    substrate = substrate_of(run, hf_config, job.weights, ranks, notify)
    begin_from = config.load_checkpoint_path
    return operations_on(
        substrate,
        base_model=config.base_names[0],
        tokenizer=TokenizerFiles(job.tokenizer, pin_tokenizer(job.tokenizer)),
        begin_from=Path(begin_from).expanduser().resolve() if begin_from else None,
        allowed_hosts=allowed_hosts(config.sync_allowed_hosts, requires_keys=job.requires_keys),
    )


def _log_to(job: ServerJob, rank: int) -> None:
    logging.basicConfig(
        level=job.config.log_level if rank == 0 else logging.WARNING,
        format=f"%(asctime)s worker {rank} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
