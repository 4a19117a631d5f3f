"""MoE routing: the top-k experts of each token, and their weights."""

from penstock_kernels.op import Op
from penstock_kernels.route.reference import route as _route

__all__ = ["route"]

route = Op("route", _route, {}, reference_name="eager")
