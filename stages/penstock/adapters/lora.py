"""LoRA on a linear layer: a frozen weight plus the trained product of two low-rank matrices.

T tokens; A is [r, in], B is [out, r]; y = W x + s B A dropout(x). s is alpha / r, or as
`scaling.lora_scaling` computes it (Hu et al. 2021, section 4). Each adapted part has its own
dropout, as in PEFT. With DoRA (`dora.py`) the rows of the resulting weight are also rescaled to
trained magnitudes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.add_low_rank import AddLowRank, can_add_in_place
from penstock.adapters.dora import Normed, SumSquares, dora_scale, no_reduce, row_norms
from penstock.adapters.factor_copies import FactorCopies
from penstock.adapters.lora_products import joint_outputs
from penstock.adapters.weight_delta import LoraDelta
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.joint_linear import JointLinear
from penstock.models.layers.linear_terms import LinearTerms, ScaledProducts, WeightedRows
from penstock.models.layers.quantized_linear import affine, dequantize_rows, get_weight, set_weight

Affine = Callable[..., torch.Tensor]
"""`x W^T + b` of x, W and an optional b."""


class LoraLinear(nn.Linear, LinearTerms, JointLinear):
    """A linear layer with a frozen weight and one pair of LoRA matrices per adapted part.

    It takes over the base layer's parameters under the same names. A fused projection has several
    parts, of which only some may be adapted; any other layer is one part. `sum_squares` is a hook
    for tensor parallelism (only a shard of the inputs is local), and `affine` a hook that replaces
    the product with the frozen weight.
    """

    def __init__(
        self,
        base: nn.Linear,
        *,
        parts: Mapping[str, int],
        adapted: Sequence[str],
        rank: int,
        scale: float,
        dropout: Mapping[str, Dropout],
        normed: Normed = "plain",
    ) -> None:
        """`parts`: output features of each part, in the order of the weight's rows; `scale`: the
        factor of B A; `dropout`: applied to the input of each adapted part's A; `normed`: whether
        the parts have DoRA magnitudes."""
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.bias = base.bias
        set_weight(self, get_weight(base))
        self.requires_grad_(False)
        self.parts = dict(parts)
        self.rank, self.scale = rank, scale
        self.sum_squares: SumSquares = no_reduce
        self.affine: Affine = affine
        device = base.weight.device
        shapes = {part: ((rank, base.in_features), (parts[part], rank)) for part in adapted}
        self.lora_A = empty_lora_params({part: a for part, (a, _) in shapes.items()}, device)
        self.lora_B = empty_lora_params({part: b for part, (_, b) in shapes.items()}, device)
        self.lora_magnitude = empty_lora_params(
            {part: (parts[part],) for part in adapted if normed == "dora"}, device
        )
        self.lora_dropout = nn.ModuleDict(dropout)
        self.is_fusable = normed == "plain" and not any(d.is_enabled for d in dropout.values())
        """Whether the base product and those of the adapters may be one node of the graph; a layout
        may set it to False."""
        self.copies: FactorCopies | None = None
        """Copies of the matrices that the layers of a model share; None: cast in each pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The base layer's output plus each adapted part's `s B A x`, in the dtype of the base
        output. Inputs are [T, in], or have more dimensions before the last."""
        if input.ndim > 2:
            return self.forward(input.flatten(0, -2)).unflatten(0, input.shape[:-1])
        if joint := joint_outputs((self,), input):
            return joint[0]
        if self.lora_magnitude:
            return self._forward_dora(input)
        y = self.affine(input, self.weight, self.bias)
        deltas = self._low_rank_factors(input)
        if deltas and can_add_in_place(y, deltas.values()):
            columns = [(self.first_row(part), self.parts[part]) for part in deltas]
            factors = [tensor for pair in deltas.values() for tensor in pair]
            return AddLowRank.apply(y, self.scale, columns, *factors)
        outputs: list[torch.Tensor] = []
        for part, rows in self._split_by_part(y):
            if part in deltas:
                product = F.linear(*deltas[part])
                # Inductor of PyTorch 2.13 drops alpha where it makes one `addmm` of both.
                if torch.compiler.is_compiling():
                    rows = rows + self.scale * product
                else:
                    rows = torch.add(rows, product, alpha=self.scale)
            outputs.append(rows.to(y.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def forward_jointly(
        self, x_TK: torch.Tensor, layers: Sequence[nn.Module]
    ) -> Sequence[torch.Tensor] | None:
        adapted = tuple(layer for layer in layers if isinstance(layer, LoraLinear))
        # Hooks, such as those of an FSDP unit, run in calls of a layer.
        has_hooks = any(layer._forward_pre_hooks or layer._forward_hooks for layer in adapted)
        outputs = None if has_hooks else joint_outputs(adapted, x_TK)
        if outputs is None:
            return None
        y_TN = iter(outputs)
        return [next(y_TN) if layer in adapted else layer(x_TK) for layer in layers]

    def products(self, x: torch.Tensor) -> list[WeightedRows] | None:
        """The terms of the weight and of B, for a layer with one part and without bias and
        magnitudes; otherwise None."""
        [part, *other_parts] = self.parts
        if other_parts or self.lora_magnitude or self.bias is not None:
            return None
        products: list[WeightedRows] = [(x, self.weight)]
        if part in self.lora_A:
            # The factor goes to r numbers of a token, and not to those of its outputs, which are
            # logits.
            products.append((self._lora_down(x, part) * self.scale, self.lora_B[part]))
        return products

    def scaled_products(self, x: torch.Tensor) -> list[ScaledProducts] | None:
        """Like `products`, also for a layer with DoRA magnitudes; see `_dora_output`."""
        [part, *other_parts] = self.parts
        if part not in self.lora_magnitude:
            plain = self.products(x)
            return [(None, plain)] if plain else None
        if other_parts or self.bias is not None:
            return None
        by = dora_scale(self.lora_magnitude[part], self._norms(part))
        more = self._lora_down(x, part) * self.scale, self.lora_B[part]
        dropped = self.lora_dropout[part](x)
        # The module returns its input where it drops nothing.
        if dropped is x:
            return [(by, [(x, self.weight), more])]
        return [(None, [(x, self.weight)]), (by - 1, [(dropped, self.weight)]), (by, [more])]

    def _low_rank_factors(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A dropout(x) [T, r] and B [out, r] of each adapted part, in one dtype under autocast."""
        dropped = {part: self.lora_dropout[part](x) for part in self.lora_A}
        if len(dropped) > 1 and all(dropped_x is x for dropped_x in dropped.values()):
            # One matmul for all parts: each would have a gradient of x, and autograd add them.
            stacked = torch.cat([*self.lora_A.values()])
            parts = self._down(x, stacked).chunk(len(dropped), dim=-1)
            downs = dict(zip(dropped, parts, strict=True))
        else:
            downs = {part: self._down(dropped[part], a) for part, a in self.lora_A.items()}
        return {part: (down, self.lora_B[part].to(down.dtype)) for part, down in downs.items()}

    def _lora_down(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return self._down(self.lora_dropout[part](x), self.lora_A[part])

    @staticmethod
    def _down(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        # Autocast would cast an fp32 copy back, and save the result for each adapter.
        return F.linear(x if torch.is_autocast_enabled(x.device.type) else x.to(a.dtype), a)

    def _forward_dora(self, x: torch.Tensor) -> torch.Tensor:
        y = self.affine(x, self.weight)
        outputs = [
            self._dora_output(x, part, rows) if part in self.lora_A else rows
            for part, rows in self._split_by_part(y)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def init_magnitudes(self) -> None:
        for part, magnitude in self.lora_magnitude.items():
            magnitude.copy_(self._norms(part))

    def _norms(self, part: str) -> torch.Tensor:
        # Detached: DoRA's gradient takes the norm as a constant (section 4.3).
        a, b = (factors[part].detach().float() for factors in (self.lora_A, self.lora_B))
        first = self.first_row(part)

        def rows(start: int, end: int) -> torch.Tensor:
            return dequantize_rows(self.weight, first + start, first + end)

        return row_norms(rows, LoraDelta(b, a, self.scale), self.sum_squares)

    def _dora_output(self, x: torch.Tensor, part: str, y: torch.Tensor) -> torch.Tensor:
        # As in PEFT, dropout applies to everything except the base output `y`.
        by = dora_scale(self.lora_magnitude[part], self._norms(part))
        # In the dtype of A and B unless autocast is on: fp32 parameters beside a bf16 weight keep
        # their precision.
        more = F.linear(self._lora_down(x, part), self.lora_B[part]) * self.scale
        dropped = self.lora_dropout[part](x)
        if dropped is x:
            return (by * (y + more.to(y.dtype))).to(y.dtype)
        first = self.first_row(part)
        weight = dequantize_rows(self.weight, first, first + self.parts[part]).to(y.dtype)
        return (y + (by - 1) * F.linear(dropped, weight) + by * more).to(y.dtype)

    def first_row(self, part: str) -> int:
        names = list(self.parts)
        return sum(self.parts[name] for name in names[: names.index(part)])

    def _split_by_part(self, y: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if len(self.parts) == 1:
            return [(part, y) for part in self.parts]
        outputs = y.split(list(self.parts.values()), dim=-1)
        return list(zip(self.parts, outputs, strict=True))


def empty_lora_params(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> nn.ParameterDict:
    """Uninitialized fp32 parameters by part."""
    # Of a dict, ParameterDict sorts the names.
    return nn.ParameterDict(
        {
            part: nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
            for part, shape in shapes.items()
        }
    )
