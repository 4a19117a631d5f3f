"""Conversions of low-bit formats in Triton, in software: for GPUs without them and the interpreter.

The interpreter's own conversions to 8-bit floats and to bfloat16 do not round as GPUs do.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from penstock_kernels.quant import formats, scales

SMALLEST = tl.constexpr(scales.SMALLEST)
E4M3_MOST = tl.constexpr(scales.E4M3_MOST)
E2M1_MOST = tl.constexpr(scales.E2M1_MOST)
INT8_MOST = tl.constexpr(scales.INT8_MOST)
INT4_MOST = tl.constexpr(scales.INT4_MOST)
NF4 = tl.constexpr(formats.NF4)
NF4_MIDPOINTS = tl.constexpr(formats.NF4_MIDPOINTS)


@triton.jit
def round_even(x):
    """To the nearest integer, halves to even; |x| below 2^22."""
    magic = 12582912.0  # 1.5 * 2^23: sums with it have no bits for fractions
    return (x + magic) - magic


@triton.jit
def to_bf16_grid(x):
    """x rounded to bfloat16, as float32; ties to even; finite values."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3(code):
    """The value of each byte, float32."""
    wide = code.to(tl.uint16)
    # float16 has the same fields, wider, and an exponent that is 8 larger.
    # 0x7F, which is NaN, becomes 480: `quantize` refuses numbers that are not finite.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def from_e8m0(code):
    """The power of two of each byte, float32; 255 is NaN."""
    wide = code.to(tl.uint32)
    # 2^-127 is subnormal in float32: its exponent field is 0.
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def to_float8(x, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """Bytes of numbers in range, ties to even: FRACTION bits, and exponents that are BIAS more."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - FRACTION
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    # Round half to even: the lowest kept bit is added to just under one half.
    normal = (size + half + ((size >> dropped) & 1)) >> dropped
    normal -= (127 - BIAS) << FRACTION
    # Below the smallest normal number, codes count steps of 2^(1 - BIAS - FRACTION).
    subnormal = round_even(tl.abs(x) * (1 << (BIAS - 1 + FRACTION))).to(tl.uint32)
    code = tl.where(size < (128 - BIAS) << 23, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e4m3(x):
    """Bytes of numbers from -448 to 448, ties to even."""
    return to_float8(x, 3, 7)


@triton.jit
def to_e5m2(x):
    """Bytes of numbers from -57344 to 57344, ties to even."""
    return to_float8(x, 2, 15)


@triton.jit
def e2m1_code(x):
    """Codes of numbers from -6 to 6, ties up in magnitude."""
    size = tl.abs(x)
    # E2M1 has 0, 0.5, 1 and 1.5 in even steps, and then 2, 3, 4 and 6.
    fine = tl.minimum((2 * size + 0.5).to(tl.int32), 3)
    coarse = 4 + (size >= 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    coarse += (size >= 5.0).to(tl.int32)
    return tl.where(size >= 1.75, coarse, fine) + 8 * (x < 0).to(tl.int32)


@triton.jit
def nf4_code(x):
    """How many midpoints lie strictly below."""
    code = (x > NF4_MIDPOINTS[0]).to(tl.int32)
    for i in tl.static_range(1, 15):
        code += (x > NF4_MIDPOINTS[i]).to(tl.int32)
    return code


@triton.jit
def decode_level(code, LEVELS: tl.constexpr):
    """The value of each code, int32 [rows, columns]."""
    if LEVELS == "nvfp4" or LEVELS == "mxfp4":
        # float16 has the same fields and an exponent that is 14 larger.
        half = ((code & 8) << 12) | ((code & 7) << 9)
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif LEVELS == "int4":
        return (code - 8).to(tl.float32)
    else:
        index = tl.arange(0, 16)
        table = tl.zeros([16], dtype=tl.float32)
        for i in tl.static_range(16):
            table = tl.where(index == i, NF4[i], table)
        flat = tl.gather(table, code.reshape(code.numel), 0)
        return flat.reshape(code.shape)


@triton.jit
def magnitude(x):
    """|x|, with infinity for NaN, which maxima would lose."""
    return tl.where(x == x, tl.abs(x), float("inf"))
