"""Run a function on several gloo ranks of this machine: forks of one warm, preloaded server.

Each rank is a fresh process (no leaked groups, hooks or random state) that starts in no time. The
first real error is what the test sees, not its echoes on other ranks; a rank that hangs is shown
with its Python stack.
"""

import datetime
import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "penstock.engine.build",
    "penstock.engine.distributed.pipeline_parallel",
    "penstock.train.rank",
    "tests.engine.traces",
    "hypothesis",
    "pyarrow.compute",
]
ECHOES = (
    "Connection reset",
    "Connection closed",
    "Broken pipe",
    "Timed out waiting",
    "connectFull",
)
GRACE_SECONDS = 2.0
"""How long the other ranks may still speak once one has failed."""


class RankError(AssertionError):
    """What the first failing rank said."""


def on_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 90,
    collectives: Literal["checked", "plain"] = "plain",
) -> list[Any]:
    """`fn(*args)` on each of `world` ranks; returns what each returned. `fn` is module-level.

    Plain collectives are quicker by a fifth. Checked ones turn a mismatch between ranks, which may
    else be a hang, into a message on each.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(world, fn, args, folder, timeout, collectives)
        results = _collect(pipes, timeout)
        hung = [rank for rank in range(world) if rank not in results]
        for rank in hung:
            processes[rank].kill()
        for process in processes:
            process.join(5)
        return _judge(results, hung, world, Path(folder))


def kill_on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, victims: Collection[int], after: float
) -> bool:
    """Start `fn(*args)` as `on_ranks` does, and SIGKILL these ranks so many seconds later, unless
    they are dead before; the others a moment after them. Whether any of the victims was killed."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(world, fn, args, folder, 90, "plain")
        wait([pipes[min(victims)]], timeout=after)
        for rank in victims:
            processes[rank].kill()
        for rank in victims:
            processes[rank].join(5)
        struck = any(processes[rank].exitcode == -signal.SIGKILL for rank in victims)
        for rank in set(range(world)) - set(victims):
            processes[rank].join(0.3 if struck else 60)
            processes[rank].kill()
            processes[rank].join(5)
        return struck


def warm_server() -> ForkServerContext:
    """Starts processes as forks of a server that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def _start(
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
    collectives: str,
) -> tuple[list[Any], list[Any]]:
    """The ranks' processes, and the pipes on which each tells what came of it."""
    context = warm_server()
    pipes: list[Any] = []
    processes: list[Any] = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        module, name = fn.__module__, fn.__qualname__
        job = (theirs, module, name, rank, world, folder, args, timeout, collectives)
        process = context.Process(target=_rank, args=job)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


def _collect(pipes: list[Any], timeout: float) -> dict[int, tuple[str, Any]]:
    results: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes) and time.monotonic() < deadline:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = wait(waiting, timeout=0.5)
        for pipe in ready:
            try:
                results[pipes.index(pipe)] = pipe.recv()
            except EOFError:
                results[pipes.index(pipe)] = ("error", "the process died without a word")
            if results[pipes.index(pipe)][0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return results


def _judge(
    results: dict[int, tuple[str, Any]], hung: list[int], world: int, folder: Path
) -> list[Any]:
    errors = {rank: text for rank, (kind, text) in results.items() if kind == "error"}
    if errors:
        causes = {r: t for r, t in errors.items() if not any(echo in t for echo in ECHOES)}
        rank = min(causes or errors)
        raise RankError(f"rank {rank} of {world}: {errors[rank]}")
    if hung:
        stacks = "\n".join((folder / f"stack_{rank}").read_text()[-3000:] for rank in hung)
        raise RankError(f"ranks {hung} of {world} hung:\n{stacks}")
    return [results[rank][1] for rank in range(world)]


def _rank(
    pipe: Connection,
    module: str,
    name: str,
    rank: int,
    world: int,
    folder: str,
    args: tuple[Any, ...],
    timeout: float,
    collectives: str,
) -> None:
    import torch
    import torch.distributed as dist

    from penstock.engine.distributed.object_unpickler import restrict_pickling

    restrict_pickling()
    stack = (Path(folder) / f"stack_{rank}").open("w")
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, timeout - 1), file=stack)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        TORCH_DISTRIBUTED_DEBUG="DETAIL" if collectives == "checked" else "OFF",
    )
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        pipe.send(("ok", getattr(importlib.import_module(module), name)(*args)))
    except BaseException as error:  # noqa: BLE001 - carried home
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    pipe.close()
    faulthandler.cancel_dump_traceback_later()
    os._exit(0)
