"""The roofline beside steps that were measured, and the bytes and operations that it counts."""

import inspect
from functools import cache

import pytest
import torch

from penstock.core.machine.device_specs import DEVICES
from penstock.estimate.dryrun.achieved import ACHIEVED
from penstock.estimate.dryrun.operators import classify, operator_traffic, triton_traffic
from penstock.estimate.dryrun.roofline import Roofline
from penstock.estimate.dryrun.rows import mean_pairs_per_token
from penstock_kernels.adamw import triton as adamw
from tests.bench.fit_roofline import (
    MOST_OFF,
    MOST_OFF_UNSEEN,
    STEPS,
    fit,
    read_counts,
    read_seconds,
    unseen_errors,
)

aten = torch.ops.aten
KIB = torch.empty(16, 16)
"""1,024 bytes."""


@cache
def steps():
    return read_counts(), read_seconds()


@pytest.mark.parametrize("name", STEPS)
def test_a_measured_step_takes_as_long_as_it_did(name):
    counts, seconds = steps()
    assert abs(counts[name].error(seconds[name], ACHIEVED)) <= MOST_OFF


def test_steps_that_the_fit_did_not_see_are_near_as_well():
    assert max(map(abs, unseen_errors(*steps()).values())) <= MOST_OFF_UNSEEN


def test_the_shares_are_those_of_the_fit():
    for operators, achieved in fit(*steps()).items():
        assert achieved.flops == pytest.approx(ACHIEVED[operators].flops, rel=0.005)
        assert achieved.bandwidth == pytest.approx(ACHIEVED[operators].bandwidth, rel=0.005)
        assert achieved.source


@pytest.mark.parametrize(
    ("func", "args", "out", "kib"),
    [
        (aten.add.Tensor, (KIB, KIB.clone()), KIB.clone(), 3),
        (aten.add_.Tensor, (KIB, KIB.clone()), KIB, 3),
        (aten.mul_.Scalar, (KIB, 2.0), KIB, 2),
        (aten.copy_.default, (KIB, KIB.clone()), KIB, 2),
        (aten.zero_.default, (KIB,), KIB, 1),
        (aten._foreach_mul_.Scalar, ([KIB, KIB.clone()], 2.0), None, 4),
        (aten._foreach_copy_.default, ([KIB], [KIB.clone()]), None, 2),
        (aten.add.Tensor, (KIB, torch.empty(1, 1).expand(16, 16)), KIB.clone(), 2 + 4 / 1024),
        (aten.index_select.default, (KIB, 0, torch.empty(4).long()), KIB[:4].clone(), 0.53125),
    ],
)
def test_bytes_are_those_read_and_those_written(func, args, out, kib):
    num_bytes, _ = operator_traffic(func, args, {}, out)
    assert num_bytes == 1024 * kib


def test_a_result_that_is_given_is_written_and_not_read():
    num_bytes, _ = operator_traffic(aten.mul.out, (KIB, KIB.clone()), {"out": KIB}, KIB)
    assert num_bytes == 3 * 1024


def test_adamw_reads_and_writes_weights_and_states_and_reads_gradients():
    names = ("weight_ptr", "gradient_ptr", "first_ptr", "second_ptr")
    values = {**dict.fromkeys(names, KIB), "lost_ptr": None, "R": 16}
    source = inspect.getsource(adamw._step.fn)
    assert triton_traffic("_step", source, values) == 7 * 1024


def test_products_in_place_compute_as_much_as_others():
    roofline = Roofline(DEVICES["h200"], 8, [100])
    left, right, out = torch.empty(3, 5), torch.empty(5, 7), torch.empty(3, 7)
    in_place = roofline.kernel(aten.addmm_.default, (out, left, right), {}, out)
    other = roofline.kernel(aten.addmm.default, (out, left, right), {}, out.clone())
    assert in_place.compute == other.compute == 2 * 3 * 5 * 7 / DEVICES["h200"].fp32


@pytest.mark.parametrize("window", [None, 0, 3, 50])
def test_pairs_are_counted_in_documents_and_windows(window):
    documents = [4, 9, 1, 30]
    reach = 1000 if window is None else window
    pairs = sum(min(own, reach) + 1 for length in documents for own in range(length))
    assert mean_pairs_per_token(documents, window) == pytest.approx(pairs / sum(documents))


def test_attention_in_a_window_computes_less():
    roofline = Roofline(DEVICES["h200"], 8, [100])
    q_TNH = torch.empty(100, 2, 8)
    sizes = torch.tensor([0, 100])
    args = (q_TNH, q_TNH, q_TNH, sizes, sizes, 100, 100, 0.0, True, False)
    whole, near = (
        roofline.kernel(aten._flash_attention_forward.default, args, kwargs, q_TNH.clone()).compute
        for kwargs in ({}, {"window_size_left": 9, "window_size_right": 0})
    )
    assert near / whole == pytest.approx(mean_pairs_per_token([100], 9) / 50.5)


@pytest.mark.parametrize(
    ("launch", "operators"),
    [
        (("mm", True, "backward", "autograd"), "products"),
        (("mm", True, "forward", "kernels/cross_entropy/sides.py:38 multiplied"), "head"),
        (("_tally", False, "forward", "kernels/cross_entropy/triton.py:145 tally"), "loss"),
        (("_grouped_mm", True, "forward", "kernels/group_gemm/native.py:54 _by_rows"), "grouped"),
        (("_scaled_mm", True, "forward", "kernels/float8/products.py:1 product"), "float8"),
        (("torch_attn::_varlen_attn", True, "forward", ""), "attention forward"),
        (("_flash_attention_backward", True, "backward", ""), "attention backward"),
        (("_step", False, "update", "kernels/adamw/triton.py:131 adamw_"), "optimizer"),
        (("mm", True, "update", "optim/muon.py:1 step"), "products"),
        (("add", False, "backward", "autograd"), "elementwise"),
    ],
)
def test_a_kernel_has_the_class_of_what_it_does(launch, operators):
    assert classify(*launch).startswith(operators)
