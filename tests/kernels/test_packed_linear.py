"""Linear layers with weights that were packed once, against those of PyTorch."""

import pytest
import torch
from torch import nn

from penstock_kernels.packed_linear import is_packable, is_packed, packed_linear, packed_weights

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_packed_layers_compute_what_plain_ones_do(dtype, bias):
    layers = [nn.Linear(96, 200, bias=bias), nn.Linear(200, 7, bias=bias)]
    if not is_packable(layers[0].weight, dtype):
        pytest.skip(f"oneDNN has no products in {dtype} on this CPU")
    network = nn.Sequential(layers[0], nn.SiLU(), layers[1])
    for shape in ((1, 96), (5, 96), (130, 96), (3, 2, 96)):
        x = torch.randn(shape)
        expected = network(x)
        with torch.no_grad(), packed_weights(layers, dtype):
            assert all(is_packed(layer.weight) for layer in layers)
            computed = network(x)
            assert packed_linear(x, layers[0].weight).dtype == computed.dtype == dtype
        error = (computed.float() - expected).norm() / expected.norm()
        assert error < ROUNDING[dtype]


def test_weights_are_packed_only_within_the_context():
    layer = nn.Linear(8, 8)
    with pytest.raises(ZeroDivisionError), packed_weights([layer], torch.float32):
        _ = 1 / 0
    assert not is_packed(layer.weight)
    x = torch.randn(2, 8)
    layer.weight.data.zero_()
    torch.testing.assert_close(layer(x), layer.bias.expand(2, 8))
    assert layer(x).requires_grad


def test_weights_that_are_not_plain_matrices_of_floats_stay_as_they_are():
    half, table = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4)
    assert not is_packable(half, torch.float64)
    assert not is_packable(table, torch.float32)
    assert not is_packable(torch.zeros(4, 4, device="meta"), torch.float32)
