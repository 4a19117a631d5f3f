"""Layers that are compiled compute what they did, as a few programs whatever the documents are."""

from functools import partial

import pytest
import torch

from penstock.core.errors import CapabilityError
from penstock.engine.backends import compile
from penstock.engine.backends.compile import compile_layers
from penstock.models.decoder import Decoder
from tests.engine.distributed.test_invariance import LIMITS, OF_ADAPTERS
from tests.engine.holdings import CONFIG
from tests.engine.inputs import write_rows
from tests.engine.laid import laid
from tests.engine.traces import errors, trace_here
from tests.ranks import on_ranks
from tests.turns import one_day_in

LAYOUTS = {
    "one process": {"kind": "untied", "data_parallel_mode": "none"},
    "adapters": {"kind": "untied", "data_parallel_mode": "none", "lora": True},
    "shard 2, adapters": {"kind": "untied", "shard": 2, "lora": True},
    "experts of two": {
        "kind": "experts",
        "shard": 2,
        "expert_parallel_size": 2,
        "balance": "of rows",
        "dropout": {"hidden": 0.3},
    },
    "sinks, adapters": {"kind": "sinks", "data_parallel_mode": "none", "lora": True},
    "few bits, adapters": {"kind": "experts", "shard": 2, "lora": "over few bits"},
    "gemma 3": {"kind": "gemma 3", "data_parallel_mode": "none"},
    "output norms, tp 2": {"kind": "output norms", "tp": 2},
    "fused layers, adapters": {
        "kind": "fused layers",
        "data_parallel_mode": "none",
        "lora": True,
    },
}
PROGRAMS = {
    "one process": 3,
    "adapters": 6,
    "shard 2, adapters": 6,
    "experts of two": 9,
    "sinks, adapters": 6,
    "few bits, adapters": 9,
    "gemma 3": 4,
    "output norms, tp 2": 6,
    "fused layers, adapters": 5,
}
"""For twelve rows of documents of 1 to 97 tokens. Below the first adapter no gradient is wanted,
which is another program; so is a layer of another kind, and what only begins where tokens travel.
"""


COMPILED = ("one process", "adapters")
OTHERS = [name for name in LAYOUTS if name not in COMPILED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiling")
    write_rows(folder / "packed", 24)
    return folder


def counted(job, backend):
    """A trace, and the programs that it took and what broke them."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend=backend)
    counters.clear()
    found = trace_here(job)
    return found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.dist
@one_day_in(3, of=0)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        # The same programs, which nobody turns into code.
        ("adapters", "aot_eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.exhaustive) for name in COMPILED),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.exhaustive) for name in OTHERS),
    ],
)
def test_compiled_layers_train_as_they_did_and_are_few_programs(name, backend, folder):
    layouts = {
        compiled: laid(f"{name}, {compiled}", enable_compile=compiled, **LAYOUTS[name])
        for compiled in (False, True)
    }
    found = {
        compiled: on_ranks(
            layout.world, counted, layout.job(folder, layout.name), backend, timeout=280
        )[0]
        for compiled, layout in layouts.items()
    }
    far = errors(found[True][0], found[False][0])
    assert far.within(OF_ADAPTERS if "adapters" in name else LIMITS), far
    assert found[False][1] == 0
    assert not found[True][2], "the graph of a layer is whole"
    assert 1 <= found[True][1] <= PROGRAMS[name]


def test_without_a_compiler_the_wish_is_refused(monkeypatch):
    monkeypatch.setattr(compile.shutil, "which", lambda _: None)
    with torch.device("meta"):
        model = Decoder(CONFIG)
    with pytest.raises(CapabilityError, match=r"enable_compile is true.*g\+\+"):
        compile_layers(model, torch.device("cpu"))
