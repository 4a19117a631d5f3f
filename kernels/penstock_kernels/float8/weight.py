"""A weight that is stored only in FP8: the result of FSDP's FP8 all-gather.

N rows, K columns.
"""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from penstock_kernels.float8.float8_matrix import Float8Matrix
from penstock_kernels.float8.hadamard import factors, turn


class Float8WeightShard(torch.Tensor):
    """Replaces a weight [N, K] in `linear`; other operations get the dequantized values, computed
    on demand.
    """

    coded: Float8Matrix
    """The quantized weight, Hadamard-transformed if there is a block."""
    block: int | None

    @staticmethod
    def __new__(
        cls, coded: Float8Matrix, block: int | None, dtype: torch.dtype
    ) -> "Float8WeightShard":
        """`dtype`: of the weight, and so of its gradient."""
        codes = coded.codes
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        wrapper.coded, wrapper.block = coded, block
        return wrapper

    def numbers(self) -> torch.Tensor:
        turned = self.coded.numbers(self.dtype)
        return turned if self.block is None else turn(turned, self.block, factors(self.block)[0])

    def __repr__(self, **_: Any) -> str:
        return f"Float8WeightShard({list(self.shape)}, {self.coded.sharing})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A view of the full tensor keeps this class."""
        aten = torch.ops.aten
        # FSDP2 calls `as_strided` on what it gathered, and nn.Parameter calls `detach`: both must
        # give this class.
        if function in (aten.detach.default, aten.as_strided.default):
            weight = args[0]
            if function is aten.detach.default or tuple(args[1]) == tuple(weight.shape):
                return cls(weight.coded, weight.block, weight.dtype)
        args, kwargs = tree_map_only(
            Float8WeightShard, Float8WeightShard.numbers, (args, kwargs or {})
        )
        return function(*args, **kwargs)
