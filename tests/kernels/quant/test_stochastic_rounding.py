"""stochastic_round: exact where it can be, its mean everywhere, cuts, Triton."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.stochastic_rounding import RowKeys, stochastic_round
from tests.kernels.quant.matrices import normal
from tests.kernels.quant.test_noise import plain_words
from tests.kernels.where import CAN_RUN_TRITON, DEVICE

BACKENDS = ["reference", "triton"] if CAN_RUN_TRITON else ["reference"]
KEY = 0xF00DFACE_89ABCDEF
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("poisoned")


def neighbours(x):
    """The numbers of bfloat16 around each one, the one closer to zero first, in fp64."""
    near = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    far = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    return near.double(), far.double()


@each_backend
def test_a_number_becomes_either_neighbour_by_the_word_that_is_its_own(backend):
    first_row, first = (5 << 32) - 1, 6
    x = normal(3, 9, scale=1.0)
    x[1] *= 1e-40  # subnormal
    got = stochastic_round.backend(backend)(x, [RowKeys(3, KEY, first_row)], first)
    for i in range(3):
        for j in range(9):
            row, column = first_row + i, first + j
            counter = (column // 4, row % 2**32, row >> 32, 2)
            word = plain_words(counter, KEY)[column % 4]
            near, far = neighbours(x[i, j].cpu())
            low = int(x[i, j].view(torch.int32)) & 0xFFFF
            want = far if low + word % 2**16 >= 2**16 else near
            assert got[i, j].double().cpu() == want


@each_backend
def test_what_bfloat16_holds_stays_to_the_bit(backend):
    bits = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(256, 256)
    every = bits.view(torch.bfloat16)
    got = stochastic_round.backend(backend)(every.float(), [RowKeys(256, KEY)])
    known = ~every.isnan()
    assert torch.equal(got.view(torch.int16)[known], bits[known])
    assert got[~known].isnan().all()
    # Also of numbers of which bfloat16 would keep no bit that says so.
    nan = torch.tensor([[0x7FFFFFFF, 0x7F800001, -1]], dtype=torch.int32, device=DEVICE)
    assert (
        stochastic_round.backend(backend)(nan.view(torch.float32), [RowKeys(1, KEY)]).isnan().all()
    )


def test_the_mean_of_many_draws_is_the_number():
    count, columns = 2000, 64
    row = normal(1, columns, scale=1.0) * torch.logspace(-30, 30, columns, device=DEVICE)
    got = stochastic_round(row.expand(count, columns).contiguous(), [RowKeys(count, KEY)]).double()
    near, far = neighbours(row)
    share = ((row - near) / (far - near)).squeeze(0)
    ups = (got == far).double().mean(0)
    assert ((got == near) | (got == far)).all()
    # Five standard deviations of so many draws.
    assert ((ups - share).abs() <= 5 * (share * (1 - share) / count).sqrt() + 1e-9).all()
    total = ((got - row) / (far - near)).sum()
    assert abs(total) < 5 * math.sqrt(count * columns / 4)


def test_small_steps_add_up_where_the_nearest_number_would_stay():
    weight = torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16)
    for step in range(256):
        weight = stochastic_round(weight.float() + 2**-12, [RowKeys(64, step)])
    # 256 steps of 1/4096 make 1/16; each adds at most a variance of 2^-12 (2^-7 - 2^-12).
    spread = math.sqrt(256 * 2**-12 * (2**-7 - 2**-12) / 64**2)
    assert abs(weight.double().mean() - 1 - 1 / 16) < 5 * spread
    assert (weight.float() + 2**-12).bfloat16().equal(weight) or weight.max() > 1


def test_other_keys_rows_and_columns_draw_apart():
    x = torch.full((200, 248), 1 + 2**-8, device=DEVICE)
    ups = stochastic_round(x, [RowKeys(200, KEY)]) > 1
    others = {
        "key": stochastic_round(x, [RowKeys(200, KEY ^ 1 << 40)]) > 1,
        "row": ups.roll(1, 0),
        "column": ups.roll(1, 1),
        "four columns on": ups.roll(4, 1),
        "2^32 rows on": stochastic_round(x, [RowKeys(200, KEY, 1 << 32)]) > 1,
    }
    spread = 5 / math.sqrt(4 * x.numel())
    assert abs(ups.double().mean() - 0.5) < spread
    for what, other in others.items():
        assert abs((ups == other).double().mean() - 0.5) < spread, what


WHOLE = normal(60, 37, scale=1.0)


@settings(max_examples=25, deadline=None)
@given(
    backend=st.sampled_from(BACKENDS),
    rows=st.lists(st.integers(0, 60), min_size=2, max_size=2, unique=True).map(sorted),
    columns=st.lists(st.integers(0, 37), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_any_cut_is_rounded_as_the_whole_is_there(backend, rows, columns):
    (start, stop), (left, right) = rows, columns
    runs = [RowKeys(25, KEY, 3), RowKeys(35, 7, (1 << 32) - 9)]
    whole = stochastic_round(WHOLE, runs)
    mine = [
        RowKeys(last - first, run.key, run.first_row + first)
        for run, begin in zip(runs, (0, 25), strict=True)
        if (first := max(start - begin, 0)) < (last := min(stop - begin, run.rows))
    ]
    part = WHOLE[start:stop, left:right]
    got = stochastic_round.backend(backend)(part, mine, left)
    assert torch.equal(got, whole[start:stop, left:right])


@pytest.mark.slow
@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    columns=st.integers(0, 40) | st.integers(509, 530),
    first=st.integers(0, 2**33),
    exponent=st.integers(-130, 120),
)
def test_triton_rounds_any_shape_as_the_reference_does_to_the_bit(rows, columns, first, exponent):
    runs = [RowKeys(count, KEY + at, at << 31) for at, count in enumerate(rows)]
    x = normal(sum(rows), columns, scale=1.0).double() * 2.0**exponent
    x = x.float()
    got = stochastic_round.backend("triton")(x, runs, first)
    assert torch.equal(got, stochastic_round.reference(x, runs, first))


@each_backend
def test_stacks_and_what_is_empty_are_taken(backend):
    compute = stochastic_round.backend(backend)
    x = normal(3, 4, 600)
    flat = compute(x.flatten(0, 1), [RowKeys(12, KEY)])
    assert torch.equal(compute(x, [RowKeys(5, KEY), RowKeys(7, KEY, 5)]).flatten(0, 1), flat)
    assert compute(x[:0], []).shape == (0, 4, 600)
    assert compute(x[..., :0], [RowKeys(12, KEY)]).shape == (3, 4, 0)


@each_backend
def test_what_makes_no_sense_is_refused(backend):
    compute = stochastic_round.backend(backend)
    x = normal(4, 8)
    with pytest.raises(ValueError, match=r"x is in torch\.bfloat16"):
        compute(x.bfloat16(), [RowKeys(4, KEY)])
    with pytest.raises(ValueError, match=r"runs have 3 rows, and \(4, 8\) has 4"):
        compute(x, [RowKeys(3, KEY)])
    with pytest.raises(ValueError, match="64 bits"):
        compute(x, [RowKeys(4, -1)])
    with pytest.raises(ValueError, match="columns begin at -1"):
        compute(x, [RowKeys(4, KEY)], -1)
    with pytest.raises(ValueError, match="it must have rows and columns"):
        compute(x[0], [RowKeys(1, KEY)])
