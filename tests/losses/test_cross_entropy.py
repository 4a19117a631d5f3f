"""The loss of trained tokens, judged by one plain cross-entropy over all logits of the head."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from penstock.adapters.dora import Normed
from penstock.adapters.lora import LoraLinear
from penstock.losses.cross_entropy import Loss, sum_cross_entropy, token_log_probs
from penstock.losses.labels import Labels
from penstock.models.layers.dropout import Dropout, DropoutRNG, dropout_rng
from penstock.models.layers.quantized_linear import QuantizedLinear
from penstock_kernels.cross_entropy import LossOptions
from penstock_kernels.quant import FORMATS, quantize

TOKENS, WIDTH, VOCAB = 53, 16, 41
CHUNKED = Loss(chunk=8)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def matrix():
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(numbers(VOCAB, WIDTH))
    return head


def adapted(normed: Normed = "plain", rate=0.0):
    head = LoraLinear(
        matrix(),
        parts={"lm_head": VOCAB},
        adapted=["lm_head"],
        rank=3,
        scale=0.5,
        dropout={"lm_head": Dropout(rate, "lm_head")},
        normed=normed,
    )
    head.lora_A["lm_head"] = nn.Parameter(numbers(3, WIDTH))
    head.lora_B["lm_head"] = nn.Parameter(numbers(VOCAB, 3))
    head.init_magnitudes()
    return head


def frozen():
    return matrix().requires_grad_(False)


def quantized():
    head = matrix()
    made = QuantizedLinear(head, FORMATS["nf4"])
    for name, raw in quantize(head.weight.detach(), FORMATS["nf4"]).as_bytes().items():
        made.get_parameter(f"weight.{name}").data.copy_(raw)
    return made


HEADS = {
    "a matrix": matrix,
    "frozen": frozen,
    "adapted": adapted,
    "adapted and normed": lambda: adapted("dora"),
    "quantized": quantized,
    "a matrix and more": lambda: nn.Sequential(matrix(), nn.Tanh()),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny products are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setting(head, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.4] = -100
    return numbers(TOKENS, WIDTH).to(dtype).requires_grad_(), HEADS[head]().to(dtype), labels


def plain(hidden, head, labels, terms=None):
    logits, terms = head(hidden).float(), terms or LossOptions()
    if terms.soft_cap:
        logits = terms.soft_cap * (logits / terms.soft_cap).tanh()
    z = logits.logsumexp(1).square()[labels != -100].sum()
    spread = {"label_smoothing": terms.smoothing, "reduction": "sum"}
    return F.cross_entropy(logits, labels, ignore_index=-100, **spread) + terms.z * z


def trained(hidden, head):
    return [hidden, *(p for p in head.parameters() if p.requires_grad)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("terms", [LossOptions(), LossOptions(smoothing=0.1, z=0.01, soft_cap=3.0)])
def test_loss_and_gradients_are_those_of_all_logits_at_once(head, terms):
    hidden, call, labels = setting(head)
    want = plain(hidden, call, labels, terms)
    inputs = trained(hidden, call)
    wanted = torch.autograd.grad(want, inputs)
    for loss in (Loss(mode="eager"), Loss(chunk=1), Loss(chunk=7), Loss()):
        got = sum_cross_entropy(hidden, call, labels, replace(loss, terms=terms))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        found = torch.autograd.grad(got, inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_scale_multiplies_the_loss_and_every_gradient_however_logits_are_made(head):
    hidden, call, labels = setting(head)
    want = 0.03 * plain(hidden, call, labels)
    inputs = trained(hidden, call)
    wanted = torch.autograd.grad(want, inputs)
    for loss in (Loss(mode="eager"), CHUNKED):
        got = sum_cross_entropy(hidden, call, labels, loss, scale=0.03)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        found = torch.autograd.grad(got, inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("terms", [LossOptions(), LossOptions(smoothing=0.1)])
def test_a_weighted_loss_is_the_sum_of_weighted_losses_of_all_logits(head, terms):
    hidden, call, labels = setting(head)
    inputs = trained(hidden, call)
    each = F.cross_entropy(call(hidden), labels, reduction="none", label_smoothing=terms.smoothing)
    for weights in (numbers(TOKENS).abs(), torch.full((TOKENS,), 3.0), 1e6 * numbers(TOKENS).exp()):
        want = (each * weights).sum() / weights.max()
        wanted = torch.autograd.grad(want, inputs, retain_graph=True)
        given = Labels.from_host(labels, torch.device("cpu"), weights)
        for loss in (Loss(mode="eager"), CHUNKED, Loss()):
            how = replace(loss, terms=terms)
            scale = 1 / weights.max().item()
            got = sum_cross_entropy(hidden, call, given, how, scale=scale)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
            found = torch.autograd.grad(got, inputs)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("head", HEADS)
def test_log_probabilities_are_those_of_all_logits_at_once(head):
    hidden, call, labels = setting(head)
    capped = 3 * (call(hidden) / 3).tanh()
    every = capped.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    want = every.masked_fill(labels == -100, 0)
    inputs, weights = trained(hidden, call), numbers(TOKENS)
    wanted = torch.autograd.grad(want, inputs, weights)
    for loss in (Loss(mode="eager"), CHUNKED, Loss()):
        got = token_log_probs(hidden, call, labels, replace(loss, terms=LossOptions(soft_cap=3.0)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(got, inputs, weights)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def several(count):
    """Labels of each token, some of them the same, some of them missing; and what each counts."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, VOCAB, (TOKENS, count), generator=generator)
    labels[torch.rand(TOKENS, count, generator=generator) < 0.3] = -100
    labels[:3] = -100
    labels[3:6] = labels[3:6, :1]
    return labels, torch.rand(TOKENS, count, generator=generator)


@pytest.mark.parametrize("head", ["a matrix", "adapted", "quantized", "a matrix and more"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_log_probabilities_of_several_labels_are_those_of_fp64_logits(head, cap):
    hidden, call, _ = setting(head)
    labels, weights = several(4)
    # Torch has no quantized products in fp64: these logits are made wide.
    logits = call(hidden).double()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    every = logits.log_softmax(-1).gather(1, labels.clamp(min=0))
    want = every.masked_fill(labels == -100, 0)
    inputs = trained(hidden, call)
    wanted = torch.autograd.grad(want, inputs, weights.double())
    for loss in (Loss(mode="eager"), CHUNKED, Loss()):
        got = token_log_probs(hidden, call, labels, replace(loss, terms=LossOptions(soft_cap=cap)))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        assert not got[labels == -100].any()
        found = torch.autograd.grad(got, inputs, weights)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("head", HEADS)
def test_one_of_several_labels_is_as_the_only_one(head):
    hidden, call, labels = setting(head)
    inputs, weights = trained(hidden, call), numbers(TOKENS)
    for loss in (Loss(mode="eager"), CHUNKED):
        alone = token_log_probs(hidden, call, labels, loss)
        among = token_log_probs(hidden, call, labels[:, None], loss)
        torch.testing.assert_close(among[:, 0], alone, rtol=1e-6, atol=1e-6)
        wanted = torch.autograd.grad(alone, inputs, weights)
        found = torch.autograd.grad(among, inputs, weights[:, None])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_several_labels_take_no_more_products_than_one():
    hidden, call, labels = setting("a matrix")
    made = []
    for each in (labels, labels[:, None].repeat(1, 8)):
        with FlopCounterMode(display=False) as counter:
            token_log_probs(hidden, call, each, CHUNKED).sum().backward()
        made.append(counter.get_total_flops())
    assert made[0] == made[1]


def test_bf16_logits_are_softmaxed_in_fp32():
    hidden, head, labels = setting("a matrix", torch.bfloat16)
    got = sum_cross_entropy(hidden, head, labels, Loss(chunk=5))
    assert got.dtype == torch.float32
    # The head's products are rounded to bf16 in both; nothing after them is.
    torch.testing.assert_close(got, plain(hidden, head, labels), rtol=1e-6, atol=0)


def test_under_autocast_products_are_in_its_dtype_and_gradients_in_the_weights():
    hidden, head, labels = setting("adapted")
    with torch.autocast("cpu", torch.bfloat16):
        got = sum_cross_entropy(hidden, head, labels, CHUNKED)
        want = plain(hidden, head, labels)
    inputs = trained(hidden, head)
    found, wanted = (torch.autograd.grad(loss, inputs) for loss in (got, want))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize("normed", ["plain", "dora"])
def test_an_adapted_head_drops_what_it_would_of_all_tokens(normed):
    hidden, call, labels = setting("a matrix")
    call = adapted(normed, rate=0.5)
    noise = DropoutRNG(1, 2, torch.arange(100, 100 + TOKENS))
    with dropout_rng(noise):
        want = plain(hidden, call, labels)
        assert want != plain(hidden, adapted(normed), labels)
        for loss in (Loss(mode="eager"), CHUNKED):
            got = sum_cross_entropy(hidden, call, labels, loss)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("head", HEADS)
def test_without_a_trained_token_the_loss_is_zero_and_gradients_are_zeros(head):
    hidden, call, labels = setting(head)
    nothing = torch.full_like(labels, -100)
    for loss in (Loss(), Loss(mode="eager")):
        for made in (
            sum_cross_entropy(hidden, call, nothing, loss),
            token_log_probs(hidden, call, nothing, loss).sum(),
        ):
            assert made.item() == 0
            for gradient in torch.autograd.grad(made, trained(hidden, call)):
                assert torch.equal(gradient, torch.zeros_like(gradient))


class Largest(TorchDispatchMode):
    """The most numbers that any operation's result had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *found])
        return made


def test_a_head_is_read_and_not_called_with_and_without_trained_tokens():
    head, calls = matrix(), []
    head.register_forward_pre_hook(lambda *_: calls.append(1))
    hidden = numbers(TOKENS, WIDTH).requires_grad_()
    for labels in (torch.arange(TOKENS) % VOCAB, torch.full((TOKENS,), -100)):
        token_log_probs(hidden, head, labels).sum().backward()
        sum_cross_entropy(hidden, head, labels, CHUNKED).backward()
    assert not calls


# Dequantizing 656 weights takes more numbers than a chunk has logits.
@pytest.mark.parametrize("head", sorted(HEADS.keys() - {"quantized"}))
def test_logits_of_more_than_a_chunk_are_never_made(head):
    hidden, call, labels = setting(head)
    most = max(VOCAB * WIDTH, hidden.numel(), 8 * VOCAB)
    for made in (sum_cross_entropy, token_log_probs):
        with Largest() as largest:
            made(hidden, call, labels, CHUNKED).sum().backward()
        assert largest.numbers == most
    with Largest() as largest:
        sum_cross_entropy(hidden, call, labels, Loss(mode="eager"))
    assert largest.numbers == int((labels != -100).sum()) * VOCAB


@pytest.mark.parametrize(
    ("head", "products"),
    # Two products for gradients, one for the logits they come from; a third as many of factors.
    [("a matrix", 3 * WIDTH), ("frozen", 2 * WIDTH), ("adapted", 2 * WIDTH + 3 * 3)],
)
def test_each_trained_token_passes_a_matrix_once_and_the_others_never(head, products):
    hidden, call, labels = setting(head)
    count = int((labels != -100).sum())
    with FlopCounterMode(display=False) as counted:
        sum_cross_entropy(hidden, call, labels, CHUNKED).backward()
    low = 3 * (2 * count * 3 * WIDTH) if head == "adapted" else 0
    assert counted.get_total_flops() == 2 * count * products * VOCAB + low


def test_what_cannot_be_is_refused():
    hidden, head, labels = setting("a matrix")
    for call in (head, nn.Sequential(head)):
        with pytest.raises(ValueError, match="labels for"):
            sum_cross_entropy(hidden, call, labels[:-1])
        with pytest.raises(ValueError, match="chunk is 0"):
            sum_cross_entropy(hidden, call, labels, Loss(chunk=0))
    with pytest.raises(ValueError, match="have no LossOptions"):
        token_log_probs(hidden, head, labels, Loss(LossOptions(smoothing=0.1)))
