"""Cross-entropy of logits made by chunks, judged by plain PyTorch over all logits in fp64."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from penstock_kernels.cross_entropy import (
    PLAIN,
    LossOptions,
    Passes,
    SoftmaxStats,
    VocabShard,
    cross_entropies,
    linear_cross_entropies,
    linear_cross_entropy,
    linear_logits,
    slope_,
    tally,
)
from penstock_kernels.cross_entropy.loss_terms import losses, slopes
from penstock_kernels.cross_entropy.passes import slope_by_, tally_by, turn_, two_pass
from penstock_kernels.op import UnsupportedError
from tests.kernels.where import DEVICE, needs_triton
from tests.turns import one_day_in

SIZES = (1, 2, 3, 7, 16, 31, 64, 97, 130, 257)
# Of norms. fp32: sums over up to 257 numbers, and exponentials of torch's softmax, good to 2e-6.
# bf16 and fp16: logits and slopes are rounded, to 8 and to 11 bits.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


@dataclass
class Case:
    """Products that add up to logits, their labels, and what is made of them."""

    rows: list[torch.Tensor]
    matrices: list[torch.Tensor]
    labels: torch.Tensor
    terms: LossOptions
    chunk: int | None
    wanted: list[bool] = field(default_factory=list)
    """Of rows and matrix of one product after another, which want a gradient."""

    @property
    def sides(self) -> list[torch.Tensor]:
        return [side for pair in zip(self.rows, self.matrices, strict=True) for side in pair]

    def fresh(self, dtype=None) -> list[torch.Tensor]:
        pairs = zip(self.sides, self.wanted, strict=True)
        return [side.detach().to(dtype).requires_grad_(wants) for side, wants in pairs]

    def wanting(self, sides) -> list[torch.Tensor]:
        return [side for side, wants in zip(sides, self.wanted, strict=True) if wants]


def any_terms(draw: random.Random) -> LossOptions:
    return LossOptions(
        smoothing=draw.choice((0.0, 0.0, 0.2)),
        z=draw.choice((0.0, 0.0, 0.1)),
        soft_cap=draw.choice((None, None, 2.0)),
    )


def any_case(seed: int, dtype: torch.dtype) -> Case:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, entries = draw.choice((0, *SIZES)), draw.choice(SIZES)
    widths = [draw.choice(SIZES[:-3]) for _ in range(draw.choice((1, 1, 2)))]
    wanted = [draw.random() < 0.8 for _ in range(2 * len(widths))]
    wanted[draw.randrange(len(wanted))] = True

    def numbers(count, width):
        made = torch.randn(count, width, generator=generator) / width**0.25
        return made.to(DEVICE, dtype)

    return Case(
        [numbers(tokens, width) for width in widths],
        [numbers(entries, width) for width in widths],
        torch.randint(0, entries, (tokens,), generator=generator).to(DEVICE),
        any_terms(draw),
        draw.choice((None, 5, 64)),
        wanted,
    )


def expected(logits, labels, terms):
    """Each token's loss, by what PyTorch and the formulas of the papers say."""
    if terms.soft_cap:
        logits = terms.soft_cap * torch.tanh(logits / terms.soft_cap)
    found = F.cross_entropy(logits, labels, reduction="none", label_smoothing=terms.smoothing)
    return found + terms.z * logits.exp().sum(1).log().square()


def check_close(got, want, dtype, *, what):
    error, size = (got.double() - want.double()).norm(), want.double().norm()
    # The gradient of a token that is sure, or of one entry, is the difference of larger numbers.
    floor = (0.05 if DEVICE == "cpu" else 0.1) * want.numel() ** 0.5
    assert error <= TOLERANCE[dtype] * max(size, floor), f"{what}: {error} of {size}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_losses_and_gradients_are_those_of_all_logits_in_fp64(dtype):
    for seed in range(120):
        case = any_case(seed, dtype)
        exact = case.fresh(torch.float64)
        logits = sum(x @ w.t() for x, w in zip(exact[::2], exact[1::2], strict=True))
        each = expected(logits, case.labels, case.terms)
        upstream = torch.linspace(-1, 2, len(each), dtype=torch.float64, device=DEVICE)
        how = {"terms": case.terms, "chunk": case.chunk}
        what = f"case {seed}: {case.terms}"

        sides = case.fresh(dtype)
        pairs = [*zip(sides[::2], sides[1::2], strict=True)]
        total = linear_cross_entropy(pairs, case.labels, **how)
        check_close(total, each.sum(), dtype, what=what)
        want = torch.autograd.grad(0.3 * each.sum(), case.wanting(exact), retain_graph=True)
        wanting = case.wanting(sides)
        got = torch.autograd.grad(0.3 * total, wanting, retain_graph=True)
        again = torch.autograd.grad(-total, wanting)
        for mine, back, theirs, side in zip(got, again, want, wanting, strict=True):
            assert mine.dtype == back.dtype == side.dtype
            check_close(mine, theirs, dtype, what=what)
            check_close(-0.3 * back, theirs, dtype, what=what)

        # Weights as small as those by which tokens of long answers may count.
        weights = torch.rand(len(each), device=DEVICE).clamp(min=1e-3)
        weighted = linear_cross_entropy(pairs, case.labels, weights_S=weights, scale=0.3, **how)
        summed = 0.3 * (each * weights.double()).sum()
        check_close(weighted, summed, dtype, what=what)
        want = torch.autograd.grad(summed, case.wanting(exact), retain_graph=True)
        for mine, theirs in zip(torch.autograd.grad(weighted, wanting), want, strict=True):
            check_close(mine, theirs, dtype, what=what)

        apart = linear_cross_entropies(pairs, case.labels, **how)
        check_close(apart, each, dtype, what=what)
        want = torch.autograd.grad(each, case.wanting(exact), upstream)
        got = torch.autograd.grad(apart, case.wanting(sides), upstream.to(apart.dtype))
        for mine, theirs in zip(got, want, strict=True):
            check_close(mine, theirs, dtype, what=what)


def test_backward_passes_over_a_kept_graph_give_the_same_gradients():
    x, labels = torch.randn(8, 4, device=DEVICE), torch.arange(8, device=DEVICE)
    head = torch.randn(10, 4, device=DEVICE, requires_grad=True)
    total = linear_cross_entropy([(x, head)], labels)
    total.backward(retain_graph=True)
    assert head.grad is not None
    want = head.grad.clone()
    for keeps in (True, False):
        head.grad.zero_()
        total.backward(retain_graph=keeps)
        assert torch.equal(head.grad, want)


needs_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="it runs on a CPU alone")
BACKENDS = [
    ("reference", range(104)),
    pytest.param("rows", range(104), marks=needs_cpu),
    pytest.param("triton", range(16), marks=needs_triton),
    *(
        pytest.param("triton", range(16 + at, 104, 4), marks=[needs_triton, one_day_in(4, of=at)])
        for at in range(4)
    ),
]


def passed_over(backend, logits, labels, terms, upstream):
    """A tally and the slopes, of logits that lie among others which are nobody's business."""
    around = torch.full((logits.shape[0] + 2, logits.shape[1] + 3), float("nan"))
    around = around.to(logits.device, logits.dtype)
    inner = around[1:-1, 1:-2]
    inner.copy_(logits)
    found = tally.backend(backend)(inner, labels, terms)
    assert torch.equal(inner, logits)
    rises = slopes(found.log_sum, found.log_sum, logits.shape[1], terms, upstream)
    slope_.backend(backend)(inner, labels, found.log_sum, rises, terms)
    made = inner.clone()
    inner.fill_(float("nan"))
    assert around.isnan().all(), "others' numbers were written"
    return found, made


def some_logits(seed: int):
    """In every kind of numbers; half of them with labels that are elsewhere."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # Kernels take 4096 entries at a time.
    width = draw.choice((4096, 4097, 5003)) if seed % 13 == 0 else draw.choice(SIZES)
    count = draw.choice((1, 2)) if width > SIZES[-1] else draw.choice((0, *SIZES[:5]))
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
    logits = (4 * torch.randn(count, width, generator=generator)).to(dtype)
    labels = torch.randint(-1 if seed % 2 else 0, width, (count,), generator=generator)
    upstream = torch.randn(count, generator=generator)
    return *(each.to(DEVICE) for each in (logits, labels, upstream)), any_terms(draw)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "seeds"), BACKENDS)
@pytest.mark.usefixtures("poisoned")
def test_every_backend_reads_and_turns_logits_as_fp64_does_and_kernels_as_the_cpu(backend, seeds):
    for seed in seeds:
        logits, labels, upstream, terms = some_logits(seed)
        dtype = logits.dtype
        found, made = passed_over(backend, logits, labels, terms, upstream)
        exact = logits.double().requires_grad_()
        whole = terms.soft_cap * (exact / terms.soft_cap).tanh() if terms.soft_cap else exact
        log_sum = whole.logsumexp(1)
        target = whole.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0)
        total = whole.sum(1) if terms.smoothing else None
        # Nothing is rounded but sums in fp32, whatever the logits' own dtype.
        for mine, theirs in zip(found, (log_sum, target, total), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                torch.testing.assert_close(mine.double(), theirs.detach(), rtol=3e-6, atol=1e-4)
        each = losses(SoftmaxStats(log_sum, target, total), logits.shape[1], terms)
        [want] = torch.autograd.grad(each, exact, upstream.double())
        check_close(made, want, dtype, what=f"{logits.shape} {terms}")
        if backend == "rows":
            turned, apart = logits.clone(), logits.clone()
            together = turn_.backend("rows")(turned, labels, logits.shape[1], terms)
            steps = two_pass(tally.backend("rows"), slope_.backend("rows"))
            torch.testing.assert_close(steps(apart, labels, logits.shape[1], terms), together)
            torch.testing.assert_close(apart, turned)
        if backend == "triton":
            of_cpu = passed_over("rows", logits.cpu(), labels.cpu(), terms, upstream.cpu())
            for one, other in zip((*found, made), (*of_cpu[0], of_cpu[1]), strict=True):
                # Sums of 5003 numbers in another order, and a rounding that goes the other way.
                rtol = TOLERANCE[dtype] / 2 if one is made else 1e-5
                if one is not None and other is not None:
                    torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=2e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weighted_losses_and_their_gradients_from_triton_are_those_of_the_cpu(dtype):
    for seed in range(6):
        case = any_case(seed, dtype)
        rows, matrices = (torch.cat(sides, 1) for sides in (case.rows, case.matrices))
        # The largest are 10^4 times the smallest, and some tokens do not count.
        weights = torch.logspace(-3, 1, len(case.labels), device=DEVICE)
        weights[::5] = 0
        logits = rows @ matrices.t()
        stats = tally.backend("triton")(logits, case.labels, case.terms)
        total = (losses(stats, len(matrices), case.terms) * weights).sum()
        factors = slopes(stats.log_sum, stats.log_sum, len(matrices), case.terms, weights)
        slope_.backend("triton")(logits, case.labels, stats.log_sum, factors, case.terms)
        sides = [side.cpu().requires_grad_() for side in (rows, matrices)]
        of_cpu = {"weights_S": weights.cpu(), "terms": case.terms}
        want = linear_cross_entropy([(sides[0], sides[1])], case.labels.cpu(), **of_cpu)
        check_close(total.cpu(), want, dtype, what=f"case {seed}")
        gradients = logits @ matrices, logits.t() @ rows
        for mine, theirs in zip(gradients, torch.autograd.grad(want, sides), strict=True):
            check_close(mine.cpu(), theirs, dtype, what=f"case {seed}: {case.terms}")


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param("rows", marks=needs_cpu),
        pytest.param("triton", marks=needs_triton),
    ],
)
def test_every_backend_reads_and_turns_logits_of_several_labels_as_fp64_does(backend):
    for seed in range(16):
        logits, _, _, terms = some_logits(seed)
        if not len(logits):
            continue
        terms, generator = LossOptions(soft_cap=terms.soft_cap), torch.Generator().manual_seed(seed)
        (count, width), dtype = logits.shape, logits.dtype
        # Some of them elsewhere, some twice.
        labels = torch.randint(-1, min(width, 4), (count, 3), generator=generator).to(DEVICE)
        upstream = torch.randn(count, 3, generator=generator).to(DEVICE)
        found, made = tally_by(tally.backend(backend), logits, labels, terms), logits.clone()
        rises = slopes(found.log_sum, found.log_sum, width, terms, upstream)
        slope_by_(slope_.backend(backend), made, labels, found.log_sum, rises, terms)
        exact = logits.double().requires_grad_()
        whole = terms.soft_cap * (exact / terms.soft_cap).tanh() if terms.soft_cap else exact
        target = whole.gather(1, labels.clamp(min=0)).masked_fill(labels < 0, 0)
        each = whole.logsumexp(1)[:, None] - target
        got = losses(found, width, terms).double()
        torch.testing.assert_close(got, each.detach(), rtol=3e-6, atol=1e-4)
        [want] = torch.autograd.grad(each, exact, upstream.double())
        check_close(made, want, dtype, what=f"{logits.shape} {terms}")


@one_day_in(3, of=2)
def test_what_is_compiled_comes_to_the_same_and_is_compiled_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    generator = torch.Generator().manual_seed(0)
    terms = LossOptions(smoothing=0.1, z=0.01, soft_cap=3.0)
    for tokens in (67, 50, 23):  # chunks of 24, 19 and 2 tokens, and of 23
        x, matrix = (torch.randn(n, 8, generator=generator) for n in (tokens, 130))
        labels = torch.randint(0, 130, (tokens,), generator=generator)
        x.requires_grad_()
        found = []
        for passes in ("auto", "compiled"):
            how: Passes = passes
            loss = linear_cross_entropy([(x, matrix)], labels, terms=terms, chunk=24, passes=how)
            found.append((loss, *torch.autograd.grad(loss, x)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    # A tally and a slope, for every number of tokens.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_gradients_are_those_of_finite_differences():
    case = any_case(8, torch.float64)
    case.wanted = [True] * len(case.wanted)
    case.labels, case.rows = case.labels[:5], [x[:5] for x in case.rows]
    terms = LossOptions(smoothing=0.1, z=0.01, soft_cap=3.0)

    def each(*sides):
        pairs = [*zip(sides[::2], sides[1::2], strict=True)]
        return linear_cross_entropies(pairs, case.labels, terms=terms, chunk=2)

    assert torch.autograd.gradcheck(each, case.fresh(torch.float64))


@pytest.mark.parametrize("terms", [PLAIN, LossOptions(smoothing=0.1, z=0.01, soft_cap=3.0)])
def test_holders_of_parts_of_a_vocabulary_find_the_loss_and_the_gradients_of_all(terms):
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (11, 23))
    labels, chunk, ends = torch.randint(0, 23, (11,), generator=generator), 4, (0, 10, 11, 23)
    x.requires_grad_()
    matrix.requires_grad_()
    want = linear_cross_entropy([(x, matrix)], labels, terms=terms)
    want_x, want_matrix = torch.autograd.grad(want, (x, matrix))
    whole = [
        tally.reference((x[at : at + chunk] @ matrix.t()).detach(), labels[at : at + chunk], terms)
        for at in range(0, 11, chunk)
    ]
    gradients = []
    for first, end in pairwise(ends):
        told = iter(whole)
        divided = VocabShard(first, 23, 12, lambda _, told=told: next(told))
        how = {"terms": terms, "chunk": chunk, "divided": divided}
        part = matrix[first:end].detach().requires_grad_()
        got = linear_cross_entropy([(x, part)], labels, **how)
        torch.testing.assert_close(got, want)
        gradients.append(torch.autograd.grad(got, (x, part)))
        of_all = VocabShard(
            first, 23, 12, lambda _: tally.reference((x @ matrix.t()), labels, terms)
        )
        made = cross_entropies(x @ part.t(), labels, terms=terms, divided=of_all).sum()
        torch.testing.assert_close(torch.autograd.grad(made, part)[0], gradients[-1][1])
    torch.testing.assert_close(sum(one for one, _ in gradients), want_x)
    torch.testing.assert_close(torch.cat([one for _, one in gradients]), want_matrix)


@pytest.mark.usefixtures("poisoned")
def test_a_gradient_in_bf16_is_added_up_in_fp32():
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(n, 16, generator=generator).bfloat16() for n in (600, 40))
    labels = torch.randint(0, 40, (600,), generator=generator)
    exact = matrix.double().requires_grad_()
    [want] = torch.autograd.grad(
        F.cross_entropy(x.double() @ exact.t(), labels, reduction="sum"), exact
    )
    errors = []
    for chunk in (600, 4):
        matrix.requires_grad_()
        [got] = torch.autograd.grad(
            linear_cross_entropy([(x, matrix)], labels, chunk=chunk), matrix
        )
        errors.append(((got.double() - want).norm() / want.norm()).item())
    # Added up in bf16, 150 roundings would make it many times as far off.
    assert errors[1] < 1.2 * errors[0]


def test_a_frozen_matrix_has_no_product_for_a_gradient():
    case = any_case(3, torch.float32)
    tokens, entries, width = 64, 31, 16
    x, matrix = torch.randn(tokens, width, requires_grad=True), torch.randn(entries, width)
    low, factor = torch.randn(tokens, 2, requires_grad=True), torch.randn(entries, 2)
    labels = torch.randint(0, entries, (tokens,))

    def products(pairs):
        with FlopCounterMode(display=False) as counted:
            linear_cross_entropy(pairs, labels, chunk=case.chunk).backward()
        return counted.get_total_flops() / (2 * tokens * entries)

    assert products([(x, matrix)]) == 2 * width
    assert products([(x.detach(), matrix), (low, factor.requires_grad_())]) == width + 3 * 2
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        linear_cross_entropy([(x, matrix)], labels)
    assert counted.get_total_flops() == 2 * tokens * entries * width


def test_what_does_not_fit_is_refused():
    x, matrix, labels = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])
    with pytest.raises(ValueError, match="label 5 is not one of the vocabulary's 5 entries"):
        linear_cross_entropy([(x, matrix)], torch.tensor([0, 5, -100]))
    with pytest.raises(ValueError, match="label -100 is not one"):
        cross_entropies(x @ matrix.t(), torch.tensor([0, -100, 1]))
    with pytest.raises(ValueError, match="several labels of a token have no LossOptions"):
        cross_entropies(x @ matrix.t(), labels[:, None], terms=LossOptions(z=0.1))
    with pytest.raises(ValueError, match="chunk is 0"):
        linear_cross_entropy([(x, matrix)], labels, chunk=0)
    with pytest.raises(ValueError, match="do not fit 3 labels and 5 entries"):
        linear_cross_entropy([(x, matrix), (x[:2], matrix)], labels)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        linear_cross_entropy([(x, matrix[:, 1:])], labels)
    for wrong in ({"smoothing": 1.0}, {"z": -1.0}, {"soft_cap": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LossOptions(**wrong)


@needs_triton
@pytest.mark.parametrize(
    ("logits", "labels", "reason"),
    [
        (torch.ones(2, 4, dtype=torch.float64), torch.zeros(2).long(), "float64"),
        (torch.ones(2, 4), torch.zeros(3).long(), r"there are \(3,\) labels"),
        (torch.ones(2, 4), torch.zeros(2).int(), "not int64"),
        (torch.ones(4, 2).t(), torch.zeros(2).long(), "lie apart"),
    ],
)
def test_kernels_refuse_what_they_would_misread(logits, labels, reason):
    with pytest.raises(UnsupportedError, match=reason):
        tally.backend("triton")(logits.to(DEVICE), labels.to(DEVICE), PLAIN)


def test_second_derivatives_are_refused():
    x, matrix, labels = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4), torch.arange(3)
    for loss in (
        linear_cross_entropy([(x, matrix)], labels),
        linear_cross_entropies([(x, matrix)], labels).sum(),
        cross_entropies(x @ matrix.t(), labels).sum(),
        linear_logits([(x, matrix)]).sum(),
    ):
        (slope,) = torch.autograd.grad(loss.square(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()
