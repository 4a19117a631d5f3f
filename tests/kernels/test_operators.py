"""Operators of mixtures, dropout and quantized matrices are what PyTorch takes them for.

Those of attention, norms, gates and rotary embedding are asked beside their other tests.
"""

import pytest
import torch
from torch.library import opcheck

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.dropout import Dropout, DropoutRNG, dropout_rng
from penstock.models.layers.module_registry import OpModule
from penstock.models.layers.quantized_linear import COMPONENTS, QuantizedMatrix
from penstock.models.layers.router import Router
from penstock_kernels.dropout import dropout, on_host
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.permute import sort_by_expert
from penstock_kernels.quant import get_format, quantize
from tests.kernels.where import CAN_RUN_TRITON, DEVICE

BACKENDS = ["native", "loops", *(["triton"] if CAN_RUN_TRITON else [])]

PLAIN = ("test_schema", "test_faketensor")
"""Of operators without gradients; the others are also asked for theirs."""


def operator(name):
    assert group_gemm
    assert dropout
    return getattr(torch.ops.penstock, name).default


def drawn(*shape, learns=True):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_(learns)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_products(backend):
    counts = torch.tensor([2, 0, 3], device=DEVICE)
    by_rows = operator(f"group_gemm_by_rows_{backend}")
    opcheck(by_rows, (drawn(7, 8), drawn(3, 4, 8), counts))
    in_other_order = drawn(3, 8, 4).mT
    opcheck(by_rows, (drawn(7, 8), in_other_order, counts), test_utils=PLAIN)
    of_groups = operator(f"group_gemm_of_groups_{backend}")
    given = drawn(7, 4, learns=False), drawn(7, 8, learns=False), counts
    opcheck(of_groups, given, test_utils=PLAIN)


@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
def test_sorting_by_expert_and_adding_up():
    order = sort_by_expert(torch.tensor([[0, 2], [-1, 1], [2, 0]], device=DEVICE), 3)
    both = order.copy_of_row, order.row_of_copy
    choice = torch.tensor([[0, 2], [-1, 1], [2, 0]], device=DEVICE)
    opcheck(operator("sort_by_expert"), (choice, 3), test_utils=PLAIN)
    opcheck(operator("permute"), (drawn(3, 5), *both))
    opcheck(operator("unpermute"), (drawn(6, 5), None, *both), test_utils=PLAIN)
    opcheck(operator("unpermute"), (drawn(6, 5), drawn(3, 2), *both))
    given = (drawn(*shape, learns=False) for shape in ((3, 5), (6, 5), (3, 2)))
    opcheck(operator("unpermute_gradients"), (*given, order.copy_of_row), test_utils=PLAIN)


@pytest.mark.parametrize("backend", ["reference", *(["triton"] if CAN_RUN_TRITON else [])])
def test_dropout_by_a_key_that_is_data(backend):
    places = torch.tensor([3, 1 << 33, -1], device=DEVICE)
    opcheck(operator(f"dropout_{backend}"), (drawn(3, 6), places, *on_host(0.3, 2**63 + 5), 2))


def module_by_id(module: OpModule):
    module.register_op()
    return module.op_id


def test_what_programs_ask_of_modules_by_number():
    matrix = QuantizedMatrix(get_format("nvfp4"), (4, 24), torch.device(DEVICE))
    for leaf, raw in quantize(drawn(4, 24, learns=False), matrix.format).as_bytes().items():
        matrix.get_parameter(leaf).data = raw
    tensors = [matrix.get_parameter(leaf) for leaf in COMPONENTS]
    number, kind = module_by_id(matrix), (24, torch.bfloat16)
    weight, told = operator("quantized_weight")(number, *tensors, *kind)
    assert torch.equal(operator("quantized_weight_again")(number, told, *tensors, *kind), weight)
    again = (number, told, *tensors, *kind)
    opcheck(operator("quantized_weight"), (number, *tensors, *kind), test_utils=PLAIN)
    opcheck(operator("quantized_weight_again"), again, test_utils=PLAIN)
    site = Dropout(0.5, "site")
    with dropout_rng(DropoutRNG(1, 2, torch.arange(3, device=DEVICE))):
        given = drawn(3, 6, learns=False), module_by_id(site)
        opcheck(operator("dropout_draws"), given, test_utils=PLAIN)
    config = ExpertsConfig(layers=(0,), num_experts=4, experts_per_token=2, intermediate_size=8)
    router = Router(config, 8, precision="fp32")
    scores = drawn(3, 2, learns=False), drawn(3, 4, learns=False), drawn(3, learns=False)
    choice = torch.tensor([[0, 1], [2, 3], [1, 0]], device=DEVICE)
    opcheck(operator("observe_router"), (*scores, choice, module_by_id(router)), test_utils=PLAIN)
