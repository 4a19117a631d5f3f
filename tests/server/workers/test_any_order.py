"""Models of several clients under any orders, refused ones too: each ends as it would alone."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import PenstockError
from penstock.server.protocol.requests import ZeroGrad
from penstock.server.protocol.worker_commands import (
    ExportCommand,
    LoadCheckpointCommand,
    WorkerOperation,
)
from tests.ranks import on_ranks
from tests.server.workers.orders import (
    answering,
    apart,
    data,
    opening,
    operations,
    passing,
    saved,
    saving,
    stepping,
)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

RANKS = {"a": 1, "b": 8, "c": 16}
ORDERS = 50


def any_orders(seed: int, out: Path) -> list[tuple[str, WorkerOperation]]:
    """Orders, and whose each is; nobody's are answers of the base model."""
    draw = random.Random(seed)
    saves = dict.fromkeys(RANKS, 0)
    orders: list[tuple[str, WorkerOperation]] = [
        (name, opening(name, rank, seed=rank, alpha=draw.choice([4.0, 40.0]), train_mlp=rank != 8))
        for name, rank in RANKS.items()
    ]
    for number in range(ORDERS):
        name, given = draw.choice(list(RANKS)), data(draw.randint(1, 4), seed=number)
        overflowing = data(1, seed=number, advantages=1.0, logprobs=1e4)
        folder = str(out / f"{name}{draw.randint(0, saves[name])}")
        kinds: dict[str, tuple[int, WorkerOperation]] = {
            "pass": (8, passing(name, given)),
            "look": (2, passing(name, given, forward_only=True)),
            "overflow": (1, passing(name, overflowing, loss="importance_sampling")),
            "refused": (1, passing(name, given, loss_reduction="token")),
            "step": (4, stepping(name, draw.choice([0.01, 0.05]), weight_decay=0.1)),
            "forget": (1, ZeroGrad(model=name)),
            "save": (2, saving(name, out / f"{name}{saves[name] + 1}")),
            "load": (
                2,
                LoadCheckpointCommand(model=name, folder=folder, optimizer=draw.random() < 0.5),
            ),
            "export": (1, ExportCommand(model=name, folder=str(out / f"{name} to sample from"))),
            "answer": (1, answering()),
        }
        weights = [weight for weight, _ in kinds.values()]
        [kind] = draw.choices(list(kinds), weights)
        saves[name] += kind == "save"
        orders.append(("" if kind == "answer" else name, kinds[kind][1]))
    return [*orders, *((name, saving(name, out / name)) for name in RANKS)]


def carried_out(model: Path, out: Path, seed: int, settings: dict[str, Any]) -> None:
    """All orders by workers that have all models, then each model's by workers of its own."""
    for who, mine in (("together", ("", *RANKS)), *((name, (name,)) for name in RANKS)):
        workers = operations(model, out, **settings)
        obey(workers, [order for name, order in any_orders(seed, out / who) if name in mine])


def obey(workers: Any, orders: Sequence[WorkerOperation]) -> None:
    for order in orders:
        try:
            workers.do(order)
        except PenstockError:
            # It changes nothing, or the same for a model that is alone.
            continue


CASES = {
    "one process": (1, {}),
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "shard 2": (2, {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2}),
}
QUICK = ("one process",)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name in CASES],
)
def test_any_orders_leave_each_model_as_it_would_be_alone(model, tmp_path, case, seed):
    world, settings = CASES[case]
    on_ranks(world, carried_out, model, tmp_path, seed, settings)
    for name in RANKS:
        together, alone = (saved(tmp_path / who / name) for who in ("together", name))
        assert apart(together, alone) == 0
