"""Attention whose tokens lie on several ranks, judged by dense attention of the whole row."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.distributed.collectives import apply_collective
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.ring_attention import ring_segments
from penstock.rows.collate import MicroBatch
from penstock.rows.shared_prefix import PrefixSharing, first_blind_rows
from tests.dense import dense_with_gradients, relative_error, visible
from tests.kernels.attention.attention_cases import random_runs
from tests.ranks import on_ranks

# Neither 2 nor 4 ranks share three key heads evenly.
HEADS, KV_HEADS, WIDTH = 12, 3, 8
SCALE = WIDTH**-0.5
TOKENS = 96

ROWS = {
    "one document": [96],
    "primes and ones": [1, 2, 3, 5, 1, 1, 7, 11, 13, 17, 19, 1, 15],
    "one longer than any share": [3, 71, 22],
    "many short": [4] * 24,
    "alike but for padding": [7] * 13 + [5],
    "one over the middle": [37, 29, 30],
}
BRANCHING = {
    "two answers to each": PrefixSharing((7, 0, 20), (10, 5, 13, 1, 16, 18), ()),
    "two long answers": PrefixSharing((30,), (29, 33), ()),
    "a prompt over the middle": PrefixSharing((3, 60), (2, 9, 5, 11), ()),
}
RUNS = {
    "images": [(0, 9), (10, 40), (45, 46), (50, 60), (60, 90)],
    "an image over all ranks": [(20, 76)],
}
ROWS |= {"images": [40, 5, 51], "an image over all ranks": [20, 76]}
ROWS |= {
    name: [*of.documents(), rest] if (rest := TOKENS - sum(of.documents())) else of.documents()
    for name, of in BRANCHING.items()
}
SINKS = torch.linspace(-1, 2, HEADS)
CASES = [
    *(("auto", name, torch.float32, None) for name in ROWS),
    ("eager", "one longer than any share", torch.float32, None),
    ("auto", "one longer than any share", torch.bfloat16, None),
    # Windows within a rank's chunk, of whole chunks, and over several ranks'; with sinks, as all
    # rows are that have a window here.
    ("auto", "one document", torch.float32, 5),
    ("auto", "primes and ones", torch.float32, 16),
    ("auto", "one over the middle", torch.float32, 24),
    ("eager", "one longer than any share", torch.float32, 50),
    ("auto", "one document", torch.float32, 96),
    ("auto", "two answers to each", torch.float32, 9),
    ("auto", "a prompt over the middle", torch.float32, 30),
    *(("auto", name, torch.float32, window) for name in RUNS for window in (3, 20)),
    # Scores of this size are capped to less than half.
    ("auto", "one longer than any share", torch.float32, None, 0.7),
    ("auto", "one over the middle", torch.float32, 24, 0.7),
]
LAYOUTS = {
    2: [ParallelDims(ring=2), ParallelDims(ulysses=2)],
    4: [ParallelDims(ring=4), ParallelDims(ulysses=4), ParallelDims(ring=2, ulysses=2)],
    8: [ParallelDims(ring=4, ulysses=2)],
}

# Sums in another order, from fp32; bf16: one rounding of inputs and results.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


def tensors(dtype):
    """q, k, v and dy of the whole row."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(TOKENS, n, WIDTH, generator=generator).to(dtype) for n in heads]


def whole_batch(lengths, branching=None, runs=()):
    tokens = torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = tokens, tokens + 1000, positions
    return MicroBatch(*ids, tuple(lengths), 90, 80, (), branching, bidirectional=tuple(runs))


def start_rows_in(name):
    spans = whole_batch(ROWS[name], BRANCHING.get(name)).spans()
    return None if spans is None else first_blind_rows(spans)


def attend_here(context, backend, name, dtype, window=None, soft_cap=None):
    """The numbers of this rank's tokens, and y, dq, dk, dv of these; with a window also what the
    sinks' gradient gets from here."""
    lengths = ROWS[name]
    batch = whole_batch(lengths, BRANCHING.get(name), RUNS.get(name, ()))
    mine = context.shard_batch(batch)
    tokens = mine.input_ids_T
    assert torch.equal(mine.labels_T, batch.labels_T[tokens])
    assert torch.equal(mine.position_ids_T, batch.position_ids_T[tokens])
    assert (mine.lengths, mine.num_tokens, mine.num_trained) == (tuple(lengths), 90, 80)
    q, k, v, dy = (part[tokens].requires_grad_() for part in tensors(dtype))
    given = [q, k, v] if window is None else [q, k, v, SINKS.clone().requires_grad_()]
    segments = context.varlen_metadata(mine, "cpu")
    sinks = None if window is None else given[3]
    y = context.attention_fn(backend)(q, k, v, segments, SCALE, window, sinks, soft_cap)
    return tokens, [y.detach(), *torch.autograd.grad(y, given, dy.detach())]


def several_layouts(layouts):
    """Of each layout and row what this rank computes."""
    results = {}
    for degrees in layouts:
        context = ContextParallel(Mesh(degrees, dist.get_rank(), "cpu"))
        for case in CASES:
            backend, name, *how = case
            tokens, parts = attend_here(context, backend, name, *how)
            _, again = attend_here(context, backend, name, *how)
            assert all(map(torch.equal, parts, again)), "the same bits each time"
            arrays = [part.float().numpy() for part in parts]
            results[degrees, case] = tokens.tolist(), arrays
    return results


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_ranks_that_share_a_row_compute_what_one_computes(world):
    ranks = on_ranks(world, several_layouts, LAYOUTS[world])
    for degrees, case in ranks[0]:
        _, name, dtype, window, *capped = case
        found = [results[degrees, case] for results in ranks]
        tokens = [token for mine, _ in found for token in mine]
        assert sorted(tokens) == list(range(TOKENS)), "each token lies on one rank"
        q, k, v, dy = tensors(dtype)
        sinks = None if window is None else SINKS
        hidden = {"start_rows": start_rows_in(name), "bidirectional": RUNS.get(name, ())}
        hidden["soft_cap"] = capped[0] if capped else None
        want = dense_with_gradients(q, k, v, dy, ROWS[name], SCALE, window, sinks, **hidden)
        forward, backward = TOLERANCE[dtype]
        for part, whole in enumerate(want):
            parts = [torch.from_numpy(arrays[part]) for _, arrays in found]
            is_of_tokens = part < 4
            got = torch.cat(parts) if is_of_tokens else torch.stack(parts).sum(0)
            expected = whole[tokens] if is_of_tokens else whole
            allowed = backward if part else forward
            assert relative_error(got, expected) < allowed, (degrees, case, part)


def bytes_sent(lengths, window=None):
    """What this rank sends in the forward pass, and in both."""
    sent, original = [0], dist.batch_isend_irecv

    def counting(operations):
        sent[0] += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return original(operations)

    context = ContextParallel(Mesh(ParallelDims(ring=4), dist.get_rank(), "cpu"))
    dist.batch_isend_irecv = counting
    q, k, v, _ = (part[:24].requires_grad_() for part in tensors(torch.float32))
    segments = context.varlen_metadata(whole_batch(lengths), "cpu")
    y = context.attention_fn("auto")(q, k, v, segments, SCALE, window)
    forward = sent[0]
    y.sum().backward()
    return forward, sent[0]


SENT_WINDOWS = (None, 5, 30)


def several_rows():
    return {
        (name, window): bytes_sent(lengths, window)
        for name, lengths in ROWS.items()
        if name not in {**BRANCHING, **RUNS}
        for window in SENT_WINDOWS
    }


def owned_by(index, ring, tokens):
    """Zigzag by its definition."""
    chunks = torch.arange(tokens).chunk(2 * ring)
    return torch.cat((chunks[index], chunks[2 * ring - 1 - index]))


@pytest.mark.dist
def test_a_ring_sends_only_what_some_query_sees():
    ranks = on_ranks(4, several_rows)
    seen_on = [owned_by(index, 4, TOKENS) for index in range(4)]
    for name, window in ranks[0]:
        sees = visible(ROWS[name], window)
        keys = sum(
            int(sees[seen_on[asker]][:, seen_on[giver]].any(0).sum())
            for asker in range(4)
            for giver in range(4)
            if asker != giver
        )
        once = keys * 2 * KV_HEADS * WIDTH * 4
        assert sum(rank[name, window][0] for rank in ranks) == once
        # There once more, and back with gradients.
        assert sum(rank[name, window][1] for rank in ranks) == 3 * once
    assert sum(rank["many short", None][1] for rank in ranks) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(1, 6),
    st.lists(st.integers(1, 30), max_size=9),
    st.none() | st.integers(1, 40),
)
def test_every_visible_pair_is_computed_once_and_no_other(ring, chunk, wanted, window):
    total, lengths = 2 * ring * chunk, []
    for length in [*wanted, 2 * ring * chunk]:
        if rest := total - sum(lengths):
            lengths.append(min(length, rest))
    plans = [ring_segments(lengths, ring, index).with_window(window) for index in range(ring)]
    assert torch.equal(computed(plans, ring, total, window), visible(lengths, window).long())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20)),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(1, 40),
)
def test_every_visible_pair_of_documents_that_branch_is_computed_once(ring, documents, window):
    prompts = tuple(prompt for prompt, *_ in documents)
    branching = PrefixSharing(prompts, tuple(each for _, *both in documents for each in both), ())
    lengths = [sum(document) for document in documents]
    lengths.append(2 * ring - sum(lengths) % (2 * ring))
    spans = whole_batch(lengths, branching).spans()
    assert spans
    plans = [
        ring_segments(lengths, ring, index, spans=spans).with_window(window)
        for index in range(ring)
    ]
    seen = visible(lengths, window, first_blind_rows(spans))
    assert torch.equal(computed(plans, ring, sum(lengths), window), seen.long())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.none() | st.integers(1, 40),
)
def test_every_visible_pair_of_bidirectional_runs_is_computed_once(
    ring, chunk, documents, draw, window
):
    total = 2 * ring * chunk
    bounds = sorted({0, total, *(draw.randint(0, total) for _ in range(documents))})
    lengths = [end - start for start, end in pairwise(bounds)]
    runs = random_runs(draw, lengths)
    plans = [
        ring_segments(lengths, ring, index, bidirectional=runs).with_window(window)
        for index in range(ring)
    ]
    seen = visible(lengths, window, bidirectional=runs)
    assert torch.equal(computed(plans, ring, total, window), seen.long())


def computed(plans, ring, total, window):
    """How often each query's score of each key is computed, [T, T]."""
    times = torch.zeros(total, total, dtype=torch.int64)
    # Two ranks with other lists would not agree on the order of the messages between them.
    assert len({tuple(step.distance for step in plan.steps) for plan in plans}) == 1
    tokens = [owned_by(index, ring, total) for index in range(ring)]

    def count(part, asking, given):
        queries, keys = asking[list(part.queries)], given[list(part.keys)]
        assert (part.mask.num_queries, part.mask.num_keys) == (len(queries), len(keys))
        hidden = part.mask.hidden_keys(torch.device("cpu"))
        seen = torch.ones(len(queries), len(keys)) if hidden is None else ~hidden
        assert all(seen.any(dim).all() for dim in (0, 1)), "each sees some, and each is seen"
        times[queries.unsqueeze(1), keys] += seen.long()

    for index, plan in enumerate(plans):
        assert sum(plan.lengths) == total // ring
        mine = tokens[index]
        start_rows = None if plan.start_rows is None else plan.start_rows.tolist()
        runs = local_runs_of(plan)
        times[mine.unsqueeze(1), mine] += visible(plan.lengths, window, start_rows, runs).long()
        for part in plan.local_blocks:
            count(part, mine, mine)
        for step in plan.steps:
            giver = (index - step.distance) % ring
            [given] = [s.send for s in plans[giver].steps if s.distance == step.distance]
            assert step.recv_count == len(given)
            for part in step.parts:
                count(part, mine, tokens[giver][list(given)])
    return times


def local_runs_of(plan):
    """The bidirectional runs of a rank's own tokens."""
    ends = [] if plan.run_ends is None else plan.run_ends.tolist()
    return [(first, end) for first, end in enumerate(ends) if end > first + 1]


def test_a_rank_alone_holds_the_row_and_attends_to_it_as_ever():
    context = ContextParallel(Mesh(ParallelDims(), 0, "cpu"))
    assert context.multiple == 1
    for backend in ("eager", "sdpa"):
        tokens, got = attend_here(context, backend, "one over the middle", torch.float32)
        assert tokens.tolist() == list(range(TOKENS))
        q, k, v, dy = tensors(torch.float32)
        want = dense_with_gradients(q, k, v, dy, [37, 29, 30], SCALE)
        assert max(map(relative_error, got, want)) < TOLERANCE[torch.float32][1]


def test_a_second_derivative_of_a_collective_is_refused():
    x = torch.ones(3, requires_grad=True)
    y = apply_collective(x, lambda x: 2 * x, lambda grad: 2 * grad)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert grad.tolist() == [8, 8, 8]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
