"""expert_mlp: results and every gradient are those of the reference in float64."""

from dataclasses import replace

import pytest
import torch

from penstock_kernels.expert_mlp import Gate, expert_mlp
from penstock_kernels.op import UnsupportedError
from penstock_kernels.permute import sort_by_expert
from tests.kernels.moe.test_permute import CHOICES
from tests.kernels.where import DEVICE, needs_triton

pytestmark = [pytest.mark.usefixtures("poisoned"), needs_triton]

# 16 bits: inner features, outputs and gradients are rounded, or cut off in Triton's interpreter.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SILU, CLAMPED = Gate(), Gate("clamped", 1.702, 1.5)
# Whether a gradient passes is decided by rounded numbers: none is near this limit.
UNCLAMPED = replace(CLAMPED, limit=50.0)
NAMES = ("y", "dx", "dweights", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")


def of_double(x, weights, order, *matrices):
    """The definition, one copy after another."""
    gate_up, down, gate, *biases = matrices
    total = x * 0
    ends = order.counts.cumsum(0).tolist()
    for row, copy in enumerate(order.copy_of_row[: sum(order.counts.tolist())].tolist()):
        expert = next(number for number, end in enumerate(ends) if row < end)
        token, k = divmod(copy, order.row_of_copy.shape[1])
        both = gate_up[expert] @ x[token] + (biases[0][expert] if biases else 0)
        if gate.name == "silu":
            gates, ups = both.chunk(2)
            inner = torch.nn.functional.silu(gates) * ups
        else:
            gates, ups = both[::2].clamp(max=gate.limit), both[1::2].clamp(-gate.limit, gate.limit)
            inner = (ups + 1) * gates * torch.sigmoid(gate.alpha * gates)
        y = down[expert] @ inner + (biases[1][expert] if biases else 0)
        y = y if weights is None else y * weights[token, k]
        total = total.index_add(0, torch.tensor([token], device=x.device), y[None])
    return total


def agrees(experts, choice, D, F, dtype, gate, layout, *, weighted=True, wants=None, run=None):
    run = run or expert_mlp.backend("triton")
    choice = torch.as_tensor(choice).to(DEVICE)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    order = sort_by_expert(choice, experts)
    x, dy = draw(len(choice), D), draw(len(choice), D)
    weights = draw(*choice.shape, dtype=torch.float32) if weighted else None
    shapes = (experts, 2 * F, D), (experts, D, F)
    matrices = [
        draw(*shape, scale=0.3) if layout == "GNK" else draw(shape[0], *shape[:0:-1], scale=0.3)
        for shape in shapes
    ]
    biases = [draw(*shape[:2]) for shape in shapes] if gate.name == "clamped" else []
    inputs = [x, *([weights] if weighted else []), *matrices, *biases]

    def results(function, double):
        own = [tensor.double() if double else tensor.clone() for tensor in inputs]
        for number, tensor in enumerate(own):
            tensor.requires_grad_(wants is None or number in wants)
        x, *further = own
        weights = further.pop(0) if weighted else None
        both = [m if layout == "GNK" else m.mT for m in further[:2]]
        y = function(x, weights, order, *both, gate, *further[2:])
        asked = [tensor for tensor in own if tensor.requires_grad]
        return y, *torch.autograd.grad(y, asked, dy.to(y.dtype), materialize_grads=True)

    names = [name for name in NAMES if weighted or name != "dweights"]
    if wants is not None:
        names = ["y", *(names[1:][number] for number in wants)]
    got, want = results(run, double=False), results(of_double, double=True)
    for name, mine, exact in zip(names, got, want, strict=False):
        scale = max(1.0, exact.abs().max().item() if exact.numel() else 0)
        torch.testing.assert_close(
            mine.double(), exact, rtol=0, atol=TOLERANCE[dtype] * scale, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize(
    ("gate", "layout", "dtype"),
    [
        (SILU, "GNK", torch.float32),
        (SILU, "GKN", torch.bfloat16),
        (CLAMPED, "GKN", torch.float32),
        (UNCLAMPED, "GNK", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("case", CHOICES.values(), ids=CHOICES)
def test_sums_and_every_gradient_are_those_of_loops_in_float64(
    case: tuple[int, torch.Tensor], gate, layout, dtype
):
    agrees(*case, 24, 16, dtype, gate, layout)


@pytest.mark.parametrize(("D", "F"), [(40, 24), (13, 7), (16, 40)])
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
def test_widths_need_not_be_those_of_tiles(D, F, gate):
    choice = torch.randint(0, 3, (30, 2), generator=torch.Generator().manual_seed(1))
    agrees(3, choice, D, F, torch.float32, gate, "GNK")


def test_without_weights_outputs_are_added_as_they_are():
    agrees(*CHOICES["copies-of-nobody"], 16, 16, torch.float32, CLAMPED, "GNK", weighted=False)


@pytest.mark.parametrize("wants", [(0,), (1,), (2, 4), (3, 5)])
def test_a_part_of_the_gradients_is_that_of_all(wants):
    agrees(*CHOICES["copies-of-nobody"], 16, 16, torch.float32, CLAMPED, "GKN", wants=wants)


def test_rows_that_were_received_may_be_fewer_than_copies():
    choice = torch.tensor([[0, -1], [-1, 1], [1, 0]], device=DEVICE)
    x, gate_up, down = (torch.randn(shape) for shape in ((3, 8), (2, 16, 8), (2, 8, 8)))
    order = sort_by_expert(choice, 2)
    fewer = replace(order, copy_of_row=order.copy_of_row[:4])
    weights = torch.rand(3, 2)
    y = [
        expert_mlp.backend("triton")(
            *(x.to(DEVICE), weights.to(DEVICE), each, gate_up.to(DEVICE), down.to(DEVICE), SILU)
        )
        for each in (order, fewer)
    ]
    assert torch.equal(*y)


def test_of_a_row_only_gates_and_ups_are_saved():
    experts, D, F = 3, 24, 16
    choice = torch.tensor([[0, 1], [2, 1]], device=DEVICE)
    x, gate_up, down = (
        torch.randn(shape, device=DEVICE, requires_grad=True)
        for shape in ((2, D), (experts, 2 * F, D), (experts, D, F))
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        order = sort_by_expert(choice, experts)
        weights = torch.ones(2, 2, device=DEVICE)
        expert_mlp.backend("triton")(x, weights, order, gate_up, down, SILU)
    assert [tuple(t.shape) for t in kept if t.dim() == 2 and len(t) == 4] == [(4, 2 * F)]


@pytest.mark.slow
def test_a_plain_call_compiles_without_a_graph_break_forward_and_backward():
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    for layout in ("GNK", "GKN"):
        agrees(*CHOICES["copies-of-nobody"], 16, 16, torch.float32, CLAMPED, layout, run=compiled)


def test_matrices_and_orders_of_others_are_refused():
    run, order = expert_mlp.backend("triton"), sort_by_expert(torch.tensor([[0, 1], [1, 0]]), 2)
    x, gate_up, down = torch.ones(2, 8), torch.ones(2, 12, 8), torch.ones(2, 8, 6)
    with pytest.raises(UnsupportedError, match=r"down \(2, 8, 5\)"):
        run(x, None, order, gate_up, down[..., :5], SILU)
    with pytest.raises(UnsupportedError, match=r"x is \(3, 8\) and the order of 2 tokens"):
        run(torch.ones(3, 8), None, order, gate_up, down, SILU)
    with pytest.raises(UnsupportedError, match=r"weights are \(2, 1\)"):
        run(x, torch.ones(2, 1), order, gate_up, down, SILU)
    with pytest.raises(UnsupportedError, match="one of the matrices has a bias"):
        run(x, None, order, gate_up, down, SILU, torch.ones(2, 12))
