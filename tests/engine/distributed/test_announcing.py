"""What rank 0 says is heard by all, and nobody waits for it longer than was said."""

import time

import pytest
import torch.distributed as dist

from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.engine.distributed.ranks import init_process_group
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

SECONDS = 2.0


def told_and_agreed():
    ranks = init_process_group(60)
    announcing = ControlBroadcast(ranks, 60)
    said = [
        announcing.broadcast(frame if ranks.is_main_process else b"")
        for frame in (b"first", b"", b"x" * 999)
    ]
    return said, announcing.all_gather_errors(b"fault" if ranks.rank == 1 else None)


def test_all_hear_the_same_and_know_who_failed():
    heard = ([b"first", b"", b"x" * 999], [None, b"fault"])
    assert on_ranks(2, told_and_agreed) == [heard, heard]


def waited_for_a_silent_one():
    """How long the other rank waited."""
    ranks = init_process_group(60)
    announcing = ControlBroadcast(ranks, SECONDS)
    began = time.monotonic()
    if not ranks.is_main_process:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            announcing.broadcast()
    waited = time.monotonic() - began
    dist.barrier()
    return waited


def test_a_rank_waits_for_rank_0_as_long_as_was_said():
    [_, waited] = on_ranks(2, waited_for_a_silent_one)
    assert SECONDS <= waited < 20
