"""FP8 linear layers: formats, scales, matmuls and a layer."""

from penstock_kernels.float8.float8_matrix import (
    BLOCK,
    Float8Matrix,
    Kind,
    Sharing,
    amax,
    compute_scales,
    largest_of_part,
    shape_of_scales,
)
from penstock_kernels.float8.linear import linear
from penstock_kernels.float8.matmuls import (
    ALONE,
    Agree,
    AmaxReduceGroups,
    Float8Recipe,
    Product,
    Recipe,
    seen,
)
from penstock_kernels.float8.operations import multiply, quantize, transpose
from penstock_kernels.float8.weight import Float8WeightShard

__all__ = [
    "ALONE",
    "BLOCK",
    "Agree",
    "AmaxReduceGroups",
    "Float8Matrix",
    "Float8Recipe",
    "Float8WeightShard",
    "Kind",
    "Product",
    "Recipe",
    "Sharing",
    "amax",
    "compute_scales",
    "largest_of_part",
    "linear",
    "multiply",
    "quantize",
    "seen",
    "shape_of_scales",
    "transpose",
]
