"""Pages of sequences that come, are forked, grow, wait again and end: each has its own tokens."""

import random
from contextlib import nullcontext
from itertools import chain, groupby
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
from penstock.engine.generation.batching import Limits, PagedDecode
from penstock.engine.generation.generator import build_generator
from penstock.engine.generation.kv_cache import KVCache, PagedPass, Prefill
from penstock.engine.generation.page_pool import PagePool, prefix_keys
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import DecodingSequence, Prompt
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.registry import get_family
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.paged.reference import gather_keys
from tests.engine import runs
from tests.engine.predicting import PREDICTING

CPU = torch.device("cpu")


def drawn_sequences(dice: random.Random) -> list[DecodingSequence]:
    """Completions of prompts, of which some begin with the same tokens."""
    beginning = [dice.randrange(50) for _ in range(30)]
    sequences: list[DecodingSequence] = []
    for number in range(dice.randint(2, 8)):
        tokens = [
            *beginning[: dice.choice((0, 9, 30))],
            *(dice.randrange(50) for _ in range(dice.randint(1, 25))),
        ]
        prompt = Prompt(tokens, SamplingParams(), num_completions=dice.choice((1, 1, 2, 5)))
        for sample in range(prompt.num_completions):
            most = dice.choice((1, 2, 17, 40))
            sequences.append(DecodingSequence(len(sequences), number, prompt, sample, most, 0))
    return sequences


class Recorder:
    """Stands in for the layers of a model: a token's key is its number and its position."""

    def __init__(self, windows):
        self.windows = windows
        self.computed = 0
        self.seen = []
        """Of each sequence in the last pass: window, first visible token, and the tokens."""

    def run(self, batch) -> None:
        ids, positions = batch.batch.input_ids_T, batch.batch.position_ids_T
        segments = batch.segments(VarlenMetadata.of(batch.batch.lengths))
        x_T1H = torch.stack((ids, positions), -1).float().unsqueeze(1)
        self.computed += batch.batch.num_tokens
        for window in self.windows:
            if isinstance(segments, Prefill):
                segments.store(x_T1H, x_T1H, window)
            elif isinstance(segments, PagedPass):
                segments.attend(x_T1H, x_T1H, x_T1H, 1.0, window, None)
                self.check(
                    segments,
                    window,
                    segments.cache.layer(self.windows.index(window), (), window).parts[0],
                )

    def check(self, segments, window, x_PS1H):
        sequences = segments.sequences[window]
        for number, count in enumerate(sequences.num_keys):
            first = sequences.first_key(number, window)
            keys = gather_keys(x_PS1H, sequences, number, first)[:, 0]
            assert keys[:, 1].tolist() == list(range(first, count))
            self.seen.append((window, first, tuple(keys[:, 0].int().tolist())))


@pytest.mark.parametrize("windows", [(None,), (7, None), (5,)], ids=str)
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "any"])
def test_each_sequence_reads_its_own_tokens_in_order_whatever_the_others_do(windows, adjacent):
    for seed in range(8):
        dice = random.Random(seed)
        sequences = drawn_sequences(dice)
        longest = max(seq.max_length for seq in sequences)
        size = dice.choice((1, 4, 16))
        total = -(-longest // size) + 1 + dice.choice((0, 3, 40, 400))
        cache = KVCache(dict.fromkeys(windows, total), size, adjacent=adjacent)
        limits = Limits(dice.choice((1, 3, 100)), dice.choice((1, 10, 1000)), 1, True)
        batches = PagedDecode(limits, cache, CPU, lambda x: x)
        # The rest joins between passes.
        prompts = [list(group) for _, group in groupby(sequences, lambda seq: seq.prompt_index)]
        batches.add(chain.from_iterable(prompts[:2]))
        del prompts[:2]
        recorder = Recorder(windows)
        while (batch := batches.next_batch()) or prompts:
            if prompts and (not batch or dice.random() < 0.3):
                batches.add(prompts.pop())
            if not batch:
                continue
            recorder.seen = []
            recorder.run(batch)
            for group in batch.after:
                for seq in group:
                    # Read before the next token: the last query of each sequence sees its tokens.
                    tokens = [*seq.prompt.tokens, *seq.tokens]
                    if recorder.seen and seq.tokens:
                        for window in windows:
                            first = 0 if window is None else max(0, len(tokens) - window)
                            assert any(
                                w == window and tuple(tokens[first:]) == read[first - begin :]
                                for w, begin, read in recorder.seen
                                if begin <= first
                            )
                    seq.append(dice.randrange(50), 0.0, None)
            batches.remove_finished()
        assert all(seq.finish_reason for seq in sequences)
        for pool in cache.pools.values():
            assert pool.available == pool.count


def test_pages_are_counted_found_again_and_given_away_last_used_first():
    pool = PagePool(4, adjacent=True)
    first, second = pool.take(), pool.take(0)
    assert (first, second) == (0, 1)
    keys = prefix_keys(range(8), 4)
    for page, key in zip((first, second), keys, strict=True):
        pool.remember(page, key)
    pool.share(first)
    for page in (second, first, first):
        pool.release(page)
    assert pool.available == 4
    assert [pool.find(key) for key in keys] == [0, 1]
    pool.share(0)
    assert pool.available == 3
    others = [pool.take() for _ in range(3)]
    assert sorted(others) == [1, 2, 3]
    assert [pool.find(key) for key in keys] == [0, None]
    with pytest.raises(KeyError):
        pool.take()


def test_prompts_that_begin_alike_are_computed_once_where_they_do():
    beginning = list(range(100, 140))
    sequences = [
        DecodingSequence(number, number, Prompt([*beginning, number]), 0, 3, 0)
        for number in range(4)
    ]
    cache = KVCache({None: 100}, 4, adjacent=True)
    batches = PagedDecode(Limits(10, 1000, 1, True), cache, CPU, lambda x: x)
    batches.add(sequences)
    recorder = Recorder([None])
    while batch := batches.next_batch():
        recorder.seen = []
        recorder.run(batch)
        for [seq] in batch.after:
            seq.append(7, 0.0, None)
        batches.remove_finished()
    # The prompt of the first, a last token of each other, and two decoded tokens of each.
    assert recorder.computed == 41 + 3 + 4 * 2


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

    whole = bytes_per_token(0, 1, 2, has_embedding=True, has_head=True)[None]
    first = bytes_per_token(0, has_embedding=True, has_head=False)[None]
    last = bytes_per_token(1, 2, has_embedding=False, has_head=True)[None]
    assert first == last == whole / 2 > 0
