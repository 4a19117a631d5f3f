"""adamw_: torch's in float32; in bfloat16 one rounding of it, at random or kept; cuts, Triton."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.adamw import RowKeys, Settings, StepTensors, adamw_, adamw_foreach_
from penstock_kernels.rng_rows import side_by_side, words
from penstock_kernels.stochastic_rounding import stochastic_round
from tests.kernels.quant.matrices import normal
from tests.kernels.where import CAN_RUN_TRITON, DEVICE

BACKENDS = ["reference", "triton"] if CAN_RUN_TRITON else ["reference"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("poisoned")

KEY = 0xF00DFACE_89ABCDEF
FP32, BF16 = torch.float32, torch.bfloat16
STEP = Settings(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3)


def inputs(*shape, weight=FP32, states=FP32):
    """A weight, a gradient and two moments."""
    return (
        normal(*shape, scale=1.0).to(weight),
        normal(*shape, seed=1, scale=0.1).to(weight),
        normal(*shape, seed=2, scale=0.1).to(states),
        normal(*shape, seed=3, scale=0.1).square().to(states),
    )


def after(backend, tensors, *how, settings=STEP, lost=None):
    """The weight and the moments after a step."""
    weight, gradient, first, second = (tensor.clone() for tensor in tensors)
    adamw_.backend(backend)(weight, gradient, first, second, settings, *how, lost=lost)
    return weight, first, second


def exact(weight, gradient, first, second, settings=STEP):
    """The same in fp64, by the published formulas."""
    w, g, m, v = (tensor.double() for tensor in (weight, gradient, first, second))
    m = settings.beta1 * m + (1 - settings.beta1) * g
    v = settings.beta2 * v + (1 - settings.beta2) * g**2
    m_hat = m / (1 - settings.beta1**settings.step)
    v_hat = v / (1 - settings.beta2**settings.step)
    decayed = w - settings.lr * settings.weight_decay * w
    return decayed - settings.lr * m_hat / (v_hat.sqrt() + settings.eps), m, v


@each_backend
def test_in_float32_it_is_torchs_optimizer(backend):
    weight, *_ = inputs(5, 70)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=STEP.lr, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps, weight_decay=0.1
    )
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 6):
        theirs.grad = normal(5, 70, seed=step, scale=10.0**-step)
        optimizer.step()
        now = Settings(STEP.lr, STEP.beta1, STEP.beta2, STEP.eps, STEP.weight_decay, step)
        adamw_.backend(backend)(weight, theirs.grad, first, second, now)
        torch.testing.assert_close(weight, theirs.detach(), rtol=1e-6, atol=1e-7)
    state = optimizer.state[theirs]
    torch.testing.assert_close(first, state["exp_avg"], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(second, state["exp_avg_sq"], rtol=1e-6, atol=1e-12)


@each_backend
@pytest.mark.parametrize("runs", [None, [RowKeys(6, KEY)]], ids=["nearest", "at random"])
@pytest.mark.parametrize(("weight", "states"), [(BF16, BF16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_what_is_kept_in_bfloat16_is_rounded_once(weight, states, runs, backend):
    tensors = inputs(6, 100, weight=weight, states=states)
    found = after(backend, tensors, runs)
    for at, (got, want) in enumerate(zip(found, exact(*tensors), strict=True)):
        # Half a unit of the last of 8 bits, or a whole one where it is at random; in fp32 a few.
        at_random = runs is not None and at != 1
        unit = 2.0**-7 if at_random else 2.0**-8
        rtol, atol = (unit * 1.001, 1e-9) if got.dtype == BF16 else (1e-5, 1e-7)
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def test_a_hundred_random_steps_are_the_formulas_rounded_once():
    for seed in range(120):
        draw = random.Random(seed)
        shape = draw.randint(1, 2), draw.randint(0, 5), draw.choice((0, 1, 2, 7, 31, 64, 97))
        dtypes = {"weight": draw.choice((FP32, BF16)), "states": draw.choice((FP32, BF16))}
        tensors = inputs(*shape, **dtypes)
        decay, step = draw.choice((0.0, 0.1)), draw.choice((1, 2, 100, 10**6))
        settings = Settings(
            draw.choice((1e-5, 1e-2)), 0.9, draw.choice((0.95, 0.999)), 1e-8, decay, step
        )
        found = after("reference", tensors, settings=settings)
        for got, want in zip(found, exact(*tensors, settings), strict=True):
            rtol, atol = (2.0**-8, 1e-9) if got.dtype == BF16 else (1e-5, 1e-7)
            torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def test_draws_are_those_of_rounding_at_random_with_halves_of_a_word_for_weight_and_moment():
    runs, first = [RowKeys(2, KEY, 5), RowKeys(4, 9)], 3
    weight, gradient, one, two = inputs(6, 50, weight=BF16, states=BF16)
    wide = [tensor.float() for tensor in (weight, gradient, one, two)]
    in_full, _, second = after("reference", wide)
    got, _, moment = after("reference", (weight, gradient, one, two), runs, first)
    assert torch.equal(got, stochastic_round(in_full, runs, first))
    drawn = torch.cat(
        [side_by_side(words(run, first, 50, 2, weight.device), first, 50) for run in runs]
    )
    bits = second.view(torch.int32) + (drawn >> 16).int()
    assert torch.equal(moment, (bits & ~0xFFFF).view(FP32).to(BF16))


@each_backend
def test_small_steps_reach_as_far_as_in_float32_at_random_or_with_what_is_lost(backend):
    # A unit of 1 in bfloat16 is 2^-7, and a step moves a weight by 2^-12.
    steps = 10 if backend == "triton" else 64
    settings = {"lr": 2**-12, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    ways = {"fp32": FP32, "nearest": BF16, "at random": BF16, "lost": BF16}
    gradient = torch.full((32, 64), -0.01, device=DEVICE)
    ends = {}
    for way, dtype in ways.items():
        weight = torch.ones(32, 64, device=DEVICE, dtype=dtype)
        states = [torch.zeros_like(weight) for _ in range(2)]
        lost = torch.zeros_like(weight) if way == "lost" else None
        for step in range(1, steps + 1):
            runs = [RowKeys(32, step)] if way == "at random" else None
            now = Settings(**settings, step=step)
            adamw_.backend(backend)(weight, gradient.to(dtype), *states, now, runs, lost=lost)
        ends[way] = weight.double() + (0 if lost is None else lost.double())
    moved = ends["fp32"].mean() - 1
    assert moved > 0.9 * steps * 2**-12
    assert (ends["nearest"] == 1).all()
    # Moments that are rounded to 8 bits change each step's length by 1 % or less, on end.
    torch.testing.assert_close(ends["lost"].mean() - 1, moved, rtol=2e-2, atol=0)
    # And five standard deviations of the mean of 2048 weights.
    spread = 5 * (steps * 2**-12 * 2**-7 / 2048) ** 0.5
    assert abs(ends["at random"].mean() - 1 - moved) < 0.02 * moved + spread


def test_a_second_moment_comes_to_what_gradients_are_however_slowly_it_changes():
    count = 3000
    states = {"nearest": None, "at random": [RowKeys(32, 1)]}
    ends = {}
    for way, runs in states.items():
        weight = torch.zeros(32, 32, device=DEVICE)
        first, second = (torch.zeros(32, 32, device=DEVICE, dtype=BF16) for _ in range(2))
        gradient = torch.ones(32, 32, device=DEVICE)
        for step in range(1, count + 1, 10):
            runs = [RowKeys(32, step)] if runs else None
            now = Settings(lr=0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, step=step)
            adamw_(weight, gradient, first, second, now, runs)
        ends[way] = second.double().mean()
    want = 1 - 0.99 ** (count // 10)
    assert abs(ends["at random"] - want) < 0.01
    assert ends["nearest"] < want - 0.1


@settings(max_examples=15, deadline=None)
@given(
    backend=st.sampled_from(BACKENDS),
    rows=st.lists(st.integers(0, 20), min_size=2, max_size=2, unique=True).map(sorted),
    columns=st.lists(st.integers(0, 37), min_size=2, max_size=2, unique=True).map(sorted),
    keeps=st.booleans(),
)
def test_any_cut_steps_as_the_whole_does_there(backend, rows, columns, keeps):
    tensors = inputs(20, 37, weight=BF16, states=BF16)
    lost = normal(20, 37, seed=4, scale=1e-4).to(BF16)
    more = {"lost": lost.clone()} if keeps else {}
    whole = (*after(backend, tensors, [RowKeys(20, KEY, 7)], lost=more.get("lost")), *more.values())
    (start, stop), (left, right) = rows, columns

    def part(tensor):
        return tensor[start:stop, left:right].contiguous()

    more = {"lost": part(lost)} if keeps else {}
    runs = [RowKeys(stop - start, KEY, 7 + start)]
    got = (*after(backend, map(part, tensors), runs, left, lost=more.get("lost")), *more.values())
    for mine, theirs in zip(got, whole, strict=True):
        assert torch.equal(mine, part(theirs))


@pytest.mark.slow
@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(0, 4), st.integers(0, 40) | st.just(523)),
    weight=st.sampled_from([FP32, BF16]),
    states=st.sampled_from([FP32, BF16]),
    keeps=st.booleans(),
    draws=st.booleans(),
    first=st.integers(0, 9),
)
def test_triton_steps_as_the_reference_does(shape, weight, states, keeps, draws, first):
    tensors = inputs(*shape, weight=weight, states=states)
    runs = [RowKeys(shape[0] * shape[1], KEY, 1 << 33)] if draws else None
    found = []
    for backend in ("triton", "reference"):
        more = {"lost": normal(*shape, seed=4, scale=1e-4).to(weight)} if keeps else {}
        found.append((*after(backend, tensors, runs, first, lost=more.get("lost")), *more.values()))
    apart = 0
    for mine, theirs in zip(*found, strict=True):
        # What is within a hair of where it would be rounded otherwise falls to either side.
        rtol, atol = (1e-5, 1e-7) if mine.dtype == FP32 else (2**-7, 2**-15)
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
        apart += int((mine != theirs).sum()) if mine.dtype == BF16 else 0
    # A GPU's reference fuses other multiply-adds.
    assert apart <= max(2, (0.01 if DEVICE == "cpu" else 0.03) * tensors[0].numel())


@each_backend
def test_what_makes_no_sense_is_refused(backend):
    step = adamw_.backend(backend)
    w, g, m, v = inputs(4, 8)
    with pytest.raises(ValueError, match=r"\(3, 8\) beside a weight of \(4, 8\)"):
        step(w, g[:3], m, v, STEP)
    with pytest.raises(ValueError, match=r"a tensor is in torch\.float16"):
        step(w, g.half(), m, v, STEP)
    with pytest.raises(ValueError, match="not contiguous"):
        step(w, g, m.T.contiguous().T, v, STEP)
    with pytest.raises(ValueError, match="steps are counted from 1"):
        step(w, g, m, v, Settings(1e-2, 0.9, 0.99, 1e-8, 0.1, 0))
    with pytest.raises(ValueError, match=r"runs have 3 rows, and \(4, 8\) has 4"):
        step(w, g, m, v, STEP, [RowKeys(3, KEY)])
    with pytest.raises(ValueError, match="it must have rows and columns"):
        step(w[0], g[0], m[0], v[0], STEP)
    step(w[:0], g[:0], m[:0], v[:0], STEP, [])


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9)) | st.tuples(st.integers(1, 20)), max_size=6
    ),
    kinds=st.lists(
        st.sampled_from([(FP32, FP32), (BF16, FP32), (BF16, BF16)]), min_size=6, max_size=6
    ),
    keeps=st.booleans(),
    small=st.sampled_from([0, 10, 1000]),
)
def test_many_are_stepped_as_each_is_alone(shapes, kinds, keeps, small):
    alone, together = [], []
    for shape, (weight, states) in zip(shapes, kinds, strict=False):
        made = inputs(*shape, weight=weight, states=states)
        lost = normal(*shape, seed=4, scale=1e-4).to(weight) if keeps else None
        together.append(StepTensors(*made, lost))
        mine = [None if part is None else part.clone() for part in together[-1]]
        rows = [None if part is None else part.view(-1, part.shape[-1]) for part in mine]
        adamw_(*rows[:4], STEP, lost=rows[4])
        alone.append(mine)
    adamw_foreach_(together, STEP, adamw_, small)
    for mine, theirs in zip(together, alone, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other or torch.equal(one, other)
