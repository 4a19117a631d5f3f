"""Ranks of `penstock run` as forks of the warm server of `ranks.py`.

For tests that call the command in their own process and are not of its launcher: torchrun's agent
and each rank would first import torch, for seconds. With torchrun run `tests/stages/train`,
`tests/pipeline/kills`, `test_machines.py` and `test_sockets.py`, and every test whose command is a
process of its own.
"""

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from penstock.core import env
from tests.ranks import warm_server


@pytest.fixture(scope="module")
def warm_ranks():
    """Has the stages of this module's tests start their ranks warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.train.launch.torchrun.run_ranks", run_ranks)
        yield


def run_ranks(
    arguments: Sequence[str], *, environment: Mapping[str, str], sink: Any, **_: object
) -> int:
    """What `penstock.engine.launch.torchrun.run_ranks` does, on one machine and without
    restarts."""
    from penstock.engine.launch.stores import store_name

    world = int(arguments[arguments.index("--nproc-per-node") + 1])
    assert "--max-restarts" not in arguments
    context = warm_server()
    with tempfile.TemporaryDirectory() as name:
        said = Path(name) / "said"
        variables = {
            **environment,
            env.RANKS_STORE: store_name(Path(name), 1),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        job = (arguments[-2:], variables, said)
        ranks = [context.Process(target=_rank, args=(rank, *job)) for rank in range(world)]
        try:
            for rank in ranks:
                rank.start()
            _join(ranks)
        finally:
            for rank in ranks:
                rank.kill()
            sink.write(said.read_bytes())
    return int(any(rank.exitcode for rank in ranks))


def _join(ranks: list[Any]) -> None:
    """Until all have ended, or the first that fails."""
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in wait([*waiting]):
            rank = waiting.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return


def _rank(rank: int, command: Sequence[str], variables: Mapping[str, str], said: Path) -> None:
    import torch

    output = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    # The interpreter reads these only as it starts.
    sys.path[:0] = folders = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    for file in (Path(folder) / "sitecustomize.py" for folder in folders):
        if file.is_file():
            runpy.run_path(str(file))
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = [*command]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
