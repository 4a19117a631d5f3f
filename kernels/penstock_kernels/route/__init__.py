"""Choosing experts for tokens, and the weights of their choice."""

from penstock_kernels.op import Op
from penstock_kernels.route.reference import route as _route

__all__ = ["route"]

route = Op("route", _route, {}, reference_name="eager")
