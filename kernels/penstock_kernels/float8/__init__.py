"""Linear layers in float8: numbers, scales, products and a layer of them."""

from penstock_kernels.float8.amax import largest_of, largest_of_part
from penstock_kernels.float8.float8_matrix import BLOCK, Coded, Sharing, shape_of_scales
from penstock_kernels.float8.formats import Kind, scales_of
from penstock_kernels.float8.linear import linear
from penstock_kernels.float8.matmuls import (
    ALONE,
    Agree,
    Agreement,
    Product,
    Recipe,
    Scheme,
    seen,
)
from penstock_kernels.float8.operations import multiply, quantise
from penstock_kernels.float8.weight import CodedWeight

__all__ = [
    "ALONE",
    "BLOCK",
    "Agree",
    "Agreement",
    "Coded",
    "CodedWeight",
    "Kind",
    "Product",
    "Recipe",
    "Scheme",
    "Sharing",
    "largest_of",
    "largest_of_part",
    "linear",
    "multiply",
    "quantise",
    "scales_of",
    "seen",
    "shape_of_scales",
]
