"""What is kept of sequences that come, grow and end: all of it, and no more room than is needed."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.data_parallel import ReplicatedSync
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.generator import build_generator
from penstock.engine.generation.kv_cache import (
    ALLOCATION_STEP,
    KVCache,
    Prefill,
    decode_segments,
    prefill_segments,
)
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.registry import get_family
from penstock_kernels.attention import VarlenMetadata
from tests.engine import runs
from tests.engine.predicting import PREDICTING

K, H = 2, 3
CPU = torch.device("cpu")


def entries(count):
    return torch.randn(count, K, H), torch.randn(count, K, H)


class Kept:
    """The cache of one layer, beside what it is to hold."""

    def __init__(self, capacity):
        self.cache = KVCache(capacity)
        self.wanted = []

    def begin(self, lengths, rows):
        plain = VarlenMetadata.of(lengths)
        k_TKH, v_TKH = entries(sum(lengths))
        segments = prefill_segments(plain, self.cache, rows, CPU)
        if isinstance(segments, Prefill):
            segments.store(k_TKH, v_TKH)
        parts = zip(k_TKH.split(lengths), v_TKH.split(lengths), rows, strict=True)
        self.wanted += [(k, v) for k, v, copies in parts for _ in range(copies)]

    def go_on(self):
        rows = len(self.wanted)
        k_BKH, v_BKH = entries(rows)
        segments = decode_segments(VarlenMetadata.of([1] * rows), self.cache)
        y_BNH = segments.attend(torch.randn(rows, K, H), k_BKH, v_BKH, 1.0, None, None)
        assert y_BNH.isfinite().all()
        self.wanted = [
            (torch.cat((k, k_BKH[row : row + 1])), torch.cat((v, v_BKH[row : row + 1])))
            for row, (k, v) in enumerate(self.wanted)
        ]

    def drop(self, row):
        self.cache.free(row)
        self.wanted[row] = self.wanted[-1]
        self.wanted.pop()

    def check(self):
        assert self.cache.lengths == [len(k) for k, _ in self.wanted]
        if not self.wanted:
            return
        found = self.cache.layer(0, entries(0))
        for row, its in enumerate(self.wanted):
            for x_BKCH, x_TKH in zip(found, its, strict=True):
                assert torch.equal(x_BKCH[row, :, : len(x_TKH)], x_TKH.transpose(0, 1))

    @property
    def room(self):
        k_BKCH, _ = self.cache.layer(0, entries(0))
        return k_BKCH.shape[0] * k_BKCH.shape[2]


def test_rows_that_come_grow_and_end_are_kept_as_they_are():
    torch.manual_seed(0)
    chance = random.Random(0)
    kept = Kept(4000)
    for _ in range(300):
        doing = chance.random()
        kept.cache.longest = max([*kept.cache.lengths, 0]) + 200
        if doing < 0.2 or not kept.wanted:
            lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 3))]
            kept.begin(lengths, [1, *(chance.randint(0, 2) for _ in lengths[1:])])
        elif doing < 0.75:
            kept.go_on()
        else:
            kept.drop(chance.randrange(len(kept.wanted)))
        kept.check()


def test_room_for_one_long_row_is_not_kept_for_each_of_many_short_ones():
    kept = Kept(10_000)
    kept.cache.longest = 8000
    kept.begin([7000], [1])
    kept.drop(0)
    kept.cache.longest = 100
    kept.begin([90] * 100, [1] * 100)
    assert kept.room <= 100 * (100 + ALLOCATION_STEP)
    for _ in range(100):
        kept.drop(0)
    kept.cache.longest = 9000
    kept.begin([8000], [1])
    assert kept.room <= 10_000 + 2 * ALLOCATION_STEP


def test_no_more_room_is_made_than_rows_may_come_to():
    kept = Kept(1000)
    kept.cache.longest = 130
    kept.begin([100] * 5, [1] * 5)
    for _ in range(30):
        kept.go_on()
        assert kept.room <= 5 * (130 + ALLOCATION_STEP)


@pytest.mark.parametrize("window", [1, 4, 20, None])
@pytest.mark.parametrize("lengths", [[9, 9], [3, 12, 7]], ids=["equal rows", "unequal rows"])
def test_a_new_token_attends_to_itself_and_to_what_its_window_reaches(window, lengths):
    kept = Kept(1000)
    kept.cache.longest = 100
    kept.begin(lengths, [1] * len(lengths))
    rows = len(lengths)
    q_BNH, (k_BKH, v_BKH) = torch.randn(rows, K, H), entries(rows)
    segments = decode_segments(VarlenMetadata.of([1] * rows), kept.cache)
    y_BNH = segments.attend(q_BNH, k_BKH, v_BKH, 0.5, window, None)
    for row, (k_TKH, v_TKH) in enumerate(kept.wanted):
        reach = slice(-(window or 100), None)
        k_TKH = torch.cat((k_TKH, k_BKH[row : row + 1]))[reach]
        v_TKH = torch.cat((v_TKH, v_BKH[row : row + 1]))[reach]
        shares_KT = (torch.einsum("kh,tkh->kt", q_BNH[row], k_TKH) * 0.5).softmax(-1)
        torch.testing.assert_close(y_BNH[row], torch.einsum("kt,tkh->kh", shares_KT, v_TKH))


def test_a_pipeline_stage_has_room_for_the_keys_of_its_own_layers_that_generate():
    hf = {**runs.TINY, **PREDICTING["glm4_moe"], "num_nextn_predict_layers": 1}
    hf["num_hidden_layers"] = 2
    train = TrainConfig.model_validate({"output_dir": "run"})
    config = get_family(hf).trained_config(hf, mtp=True)

    def bytes_per_token(*layers, **ends):
        with torch.device("meta"):
            part = Decoder(config, part=PipelineStageModules(layers, **ends))
        mesh = Mesh(ParallelDims(), 0, "cpu")
        layout = ParallelModel(
            mesh, [part], [], ContextParallel(mesh), ReplicatedSync([]), None, nullcontext
        )
        ranks = ProcessInfo(0, 0, 1, CPU)
        logits: Any = None  # no token is generated
        return build_generator(train, layout, ranks, logits).kv_cache_bytes_per_token

    whole = bytes_per_token(0, 1, 2, has_embedding=True, has_head=True)
    first = bytes_per_token(0, has_embedding=True, has_head=False)
    last = bytes_per_token(1, 2, has_embedding=False, has_head=True)
    assert first == last == whole / 2 > 0
