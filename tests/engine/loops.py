"""A training loop of this rank, opened up before its first step so that a test may watch it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engine.build import assemble
from penstock.engine.distributed.param_shards import local
from penstock.engine.distributed.ranks import ProcessInfo, init_process_group
from penstock.engine.hf.config import read_hf_config
from penstock.models.decoder import Decoder
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.train.eval.evaluator import Evaluator
from penstock.train.launch.job import Job
from penstock.train.launch.stop_request import StopRequest
from penstock.train.trainer import Trainer

Arrays = dict[str, np.ndarray]
"""By the names of tensors in a checkpoint; torch's do not outlive the process of their rank."""


def loop_of(job: Job, ranks: ProcessInfo | None = None) -> Trainer:
    """The loop that `penstock.train.rank` would run, with everything it stands on."""
    torch.set_num_threads(1)
    ranks = ranks or init_process_group(60)
    model = job.config.model
    hf_config = read_hf_config(job.config_path, model.foundation, runs_code=model.trust_remote_code)
    how = {"adapter": job.adapter, "images": job.images}
    built = assemble(job.config, hf_config, job.weights, ranks, lambda _: None, **how)
    return Trainer(job, built, ranks, StopRequest())


def decoder_of(loop: Trainer) -> Decoder:
    """The model itself, without what a layout may have wrapped around it."""
    [model] = loop.built.engine.model.parts
    assert isinstance(model, Decoder)
    return model


def parameters_of(loop: Trainer) -> Arrays:
    """Every parameter's whole value, on every rank."""
    return _whole(loop, lambda parameter: parameter.detach())


def before_each_update(loop: Trainer, look: Callable[[], Any]) -> list[Any]:
    """What `look` finds just before every step of the optimizer; filled while the loop runs."""
    found: list[Any] = []
    loop.built.engine.optimizer.register_step_pre_hook(lambda *_: found.append(look()))
    return found


def gradients_of(loop: Trainer) -> Arrays:
    """The whole gradient of every parameter that has one, on every rank."""
    return _whole(loop, lambda parameter: parameter.grad)


def _whole(loop: Trainer, take: Callable[[nn.Parameter], torch.Tensor | None]) -> Arrays:
    """What all ranks' pieces of a tensor make together. Every number must be on some rank, and
    ranks that hold the same numbers must hold the same bits."""
    mine: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]] = []
    for local_param in loop.built.engine.model.params:
        tensor = take(local_param.parameter)
        if tensor is None:
            continue
        for piece in local_param.shards:
            box = piece.view(local(tensor))
            # numpy knows no bfloat16.
            box = (box.float() if box.is_floating_point() else box).numpy().copy()
            mine.append((piece.tensor, piece.full_shape, piece.offsets, box))
    found: Arrays = {}
    for boxes in loop.ranks.all_gather(mine):
        for name, shape, offsets, box in boxes:
            # Bytes of quantized weights too: what is missing is no number.
            kind = np.promote_types(box.dtype, np.float32)
            whole = found.setdefault(name, np.full(shape, np.nan, kind))
            ends = zip(offsets, box.shape, strict=True)
            at = tuple(slice(first, first + size) for first, size in ends)
            assert (np.isnan(whole[at]) | (whole[at] == box)).all(), f"{name} is not the same twice"
            whole[at] = box
    for name, whole in found.items():
        assert not np.isnan(whole).any(), f"{name} is not whole"
    return found


def calls_of(module: nn.Module, look: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
    """What `look` finds in the arguments of every call of `module`; filled while the loop runs."""
    found: list[Any] = []
    module.register_forward_pre_hook(lambda _, arguments: found.append(look(arguments)))
    return found


def step(loop: Trainer) -> dict[str, Any]:
    """The next step and its record, without the save that ends a run."""
    return loop._step()


def peak_memory(loop: Trainer) -> int:
    """Bytes, the most of any rank, since the step before the last read it."""
    return loop._memory[0] // loop.ranks.world_size


def save(loop: Trainer) -> None:
    """A checkpoint of the step that the loop is at."""
    loop.saves._write(loop.at, {"owes": []})
    loop.saves.finish()


def evaluated(loop: Trainer, rows: PackedRows) -> dict[str, float]:
    """What an evaluation tells of these rows."""
    held_out = Evaluator(rows, loop.built, loop.ranks, loop.train, loop.reading, rows_per_batch=1)
    found = held_out.evaluate(lambda: False)
    assert found is not None
    return found


def looked_at(loop: Trainer, batches: Sequence[MicroBatch]) -> tuple[float, float, float]:
    """The summed loss of these batches, passed forward as evaluations do, their trained tokens, and
    those of them that were foretold."""
    kinds = [torch.zeros(sum(batch.lengths), dtype=torch.int64) for batch in batches]
    [found] = loop.ranks.all_reduce_sum(loop.built.evaluator.counts(batches, kinds, 1)).tolist()
    loss, _, tokens, right = found
    return loss, tokens, right


def each(look: Callable[[Job], Any], jobs: Mapping[str, Job]) -> dict[str, Any]:
    """What `look` finds for each job: several looks for the price of one start of the ranks."""
    found = {}
    for name, job in jobs.items():
        try:
            found[name] = look(job)
        except Exception as error:
            error.add_note(f"while looking at {name}")
            raise
    return found
