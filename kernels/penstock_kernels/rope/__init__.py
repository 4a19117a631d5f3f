"""Rotary position embedding, applied to queries and keys together."""

from penstock_kernels.op import Op
from penstock_kernels.rope.reference import rope as _reference

__all__ = ["rope"]

rope = Op("rope", _reference, {})
