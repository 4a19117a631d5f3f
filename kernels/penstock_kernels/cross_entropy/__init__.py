"""Linear cross-entropy: logits are computed for a chunk of tokens at a time."""

from penstock_kernels.cross_entropy.linear import (
    cross_entropies,
    eager_cross_entropies,
    linear_cross_entropies,
    linear_cross_entropy,
)
from penstock_kernels.cross_entropy.loss_terms import PLAIN, LossOptions, SoftmaxStats, VocabShard
from penstock_kernels.cross_entropy.passes import Passes, slope_, tally
from penstock_kernels.cross_entropy.sides import Product, linear_logits

__all__ = [
    "PLAIN",
    "LossOptions",
    "Passes",
    "Product",
    "SoftmaxStats",
    "VocabShard",
    "cross_entropies",
    "eager_cross_entropies",
    "linear_cross_entropies",
    "linear_cross_entropy",
    "linear_logits",
    "slope_",
    "tally",
]
