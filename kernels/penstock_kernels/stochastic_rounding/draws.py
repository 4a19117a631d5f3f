"""Random words and roundings in registers, for Triton kernels; equal to the reference."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportReturnType=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from penstock_kernels.launch_sizes import next_power_of_2
from penstock_kernels.quant.triton_numbers import to_bf16_grid
from penstock_kernels.stochastic_rounding import reference

PURPOSE = tl.constexpr(reference.PURPOSE)
LOW = tl.constexpr(reference.LOW)

ELEMENTS = 2048
"""In a program."""
COLUMNS = 512
"""At most, side by side."""


def tile(columns: int) -> tuple[int, int]:
    """Rows and columns of a program, powers of 2, for rows of so many."""
    across = max(4, min(COLUMNS, next_power_of_2(columns)))
    return ELEMENTS // across, across


@triton.jit
def random_words(
    row, runs_ptr, num_runs, first, ROWS: tl.constexpr, ACROSS: tl.constexpr, RUNS: tl.constexpr
):
    """A word of 32 bits for each of ROWS x ACROSS elements, those of the program's columns."""
    runs = tl.arange(0, RUNS)
    # Missing ends are set beyond all rows.
    ends = tl.load(runs_ptr + runs, mask=runs < num_runs, other=0x7FFFFFFFFFFFFFFF)
    # As many runs end at or before a row as come before its own.
    run = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    run = tl.minimum(run, num_runs - 1)
    key = tl.load(runs_ptr + num_runs + run)[:, None]
    number = (row + tl.load(runs_ptr + 2 * num_runs + run))[:, None]
    group = (first // 4 + tl.program_id(1) * (ACROSS // 4)) + tl.arange(0, ACROSS // 4)
    zero = tl.zeros([ROWS, ACROSS // 4], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        key,
        zero + group.to(tl.uint32)[None, :],
        zero + number.to(tl.uint32),
        zero + (number >> 32).to(tl.uint32),
        zero + PURPOSE,
    )
    # Columns of a group are contiguous.
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def round_stochastically(x, drawn):
    """x rounded to bfloat16 by random numbers from 0 to 65535, as float32."""
    bits = (x.to(tl.uint32, bitcast=True) + drawn) & 0xFFFF0000
    # The sum may carry a NaN's bits over into another number.
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def round_to_nearest(x):
    """x rounded to the nearest bfloat16, ties to even, as float32."""
    return tl.where(x == x, to_bf16_grid(x), x)


@triton.jit
def as_bfloat16(x):
    """bfloat16 of float32 that is representable: its upper half. Conversions flush the smallest
    numbers in the interpreter.
    """
    bits = x.to(tl.uint32, bitcast=True) >> 16
    # The payload of a NaN may be in the lower half only.
    bits = tl.where(x == x, bits, 0x7FC0)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
