"""Logits in fp32 of hidden states and weights in bf16, judged by products in fp64."""

from copy import deepcopy
from functools import partial
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.dora import Normed
from penstock.adapters.lora import LoraLinear
from penstock.losses.cross_entropy import Loss, compute_logits, sum_cross_entropy, token_log_probs
from penstock.models.layers.dropout import Dropout, DropoutRNG, dropout_rng
from penstock.models.layers.quantized_linear import QuantizedLinear
from penstock_kernels.cross_entropy import LossOptions
from penstock_kernels.quant import FORMATS, dequantize, quantize

TOKENS, WIDTH, VOCAB, RANK = 53, 32, 41, 3


def numbers(*shape):
    """Of which bf16 has each."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return noise.bfloat16().float()


def plain():
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(numbers(VOCAB, WIDTH))
    return head, head.weight.detach()


def adapted(normed: Normed = "plain"):
    head, weight = plain()
    head = LoraLinear(
        head,
        parts={"lm_head": VOCAB},
        adapted=["lm_head"],
        rank=RANK,
        scale=0.5,
        dropout={"lm_head": Dropout(0.0, "lm_head")},
        normed=normed,
    )
    # Few numbers, of few bits: bf16 has their products with hidden states too.
    head.lora_A["lm_head"] = nn.Parameter(torch.eye(RANK, WIDTH))
    head.lora_B["lm_head"] = nn.Parameter(numbers(VOCAB, RANK))
    more = head.lora_B["lm_head"] @ head.lora_A["lm_head"]
    return head, weight + 0.5 * more.detach()


def normed():
    head, weight = adapted("dora")
    return head, 2 * weight


def put_magnitudes(head):
    """At twice the norms, whatever these are rounded to."""
    head.init_magnitudes()
    head.lora_magnitude["lm_head"].data *= 2


def quantized():
    head, weight = plain()
    codes = quantize(weight, FORMATS["nf4"])
    made = QuantizedLinear(head, FORMATS["nf4"])
    for name, raw in codes.as_bytes().items():
        made.get_parameter(f"weight.{name}").data.copy_(raw)
    return made, dequantize(codes, torch.float32)


HEADS = {"plain": plain, "adapted": adapted, "normed": normed, "quantized": quantized}


def computed(loss, head, hidden, labels):
    hidden = hidden.detach().requires_grad_()
    total = sum_cross_entropy(hidden, head, labels, loss)
    return total.detach(), torch.autograd.grad(total, hidden)[0]


@pytest.mark.parametrize("mode", ["eager", "chunked"])
@pytest.mark.parametrize("kind", HEADS)
def test_logits_in_fp32_are_those_of_what_is_kept_in_bf16(kind, mode):
    head, weight = HEADS[kind]()
    hidden, labels = numbers(TOKENS, WIDTH).bfloat16(), torch.arange(TOKENS) % VOCAB
    labels[::5] = -100
    exact = hidden.double().requires_grad_()
    want = F.cross_entropy(exact @ weight.double().T, labels, reduction="sum")
    slope = torch.autograd.grad(want, exact)[0]

    def errors(precision):
        got, dhidden = computed(Loss(mode=mode, chunk=8, precision=precision), head, hidden, labels)
        return abs(got / want - 1), (dhidden - slope).norm() / slope.norm()

    for casting in (False, True):
        # Weights that lie in bf16 themselves, as FSDP gives them, or that autocast would cast.
        if not casting and kind != "quantized":
            head = head.bfloat16()
        elif kind != "quantized":
            head = head.float()
        if kind == "normed":
            put_magnitudes(head)
        with torch.autocast("cpu", torch.bfloat16, enabled=casting):
            loss_error, slope_error = errors("fp32")
            rounded_error, _ = errors("model")
        assert loss_error < 1e-6
        assert slope_error < 4e-3  # Rounded to bf16 like the hidden states.
        assert rounded_error > 1e-5


def test_logits_that_are_put_together_by_another_are_in_fp32_too():
    head, weight = plain()
    hidden = numbers(TOKENS, WIDTH).bfloat16()

    def halves(x):
        return torch.cat([compute_logits(x, head.bfloat16(), "fp32")] * 2, dim=-1)

    got = compute_logits(hidden, halves, "fp32")
    want = (hidden.double() @ weight.double().T).repeat(1, 2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_log_probabilities_follow():
    head, weight = plain()
    hidden, labels = numbers(TOKENS, WIDTH).bfloat16(), torch.arange(TOKENS) % VOCAB
    got = token_log_probs(hidden, head.bfloat16(), labels, Loss(precision="fp32"))
    want = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, labels[:, None])
    torch.testing.assert_close(got.double(), want.squeeze(1), rtol=1e-5, atol=1e-5)


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def along(found: torch.Tensor, true: torch.Tensor) -> float:
    """How much longer or shorter `found` is in the direction of `true`."""
    found, true = found.double(), true.double()
    return ((found * true).sum() / true.square().sum() - 1).item()


TOKENS_MOST, MANY = 514, 2048
BF16 = {"dtype": torch.bfloat16}


def plain_head(weight: torch.Tensor) -> nn.Module:
    head = nn.Linear(weight.shape[1], MANY, bias=False, **BF16)
    head.weight = nn.Parameter(weight)
    return head


def adapted_head(
    weight: torch.Tensor, normed: Normed = "plain", dropout: float = 0.0
) -> LoraLinear:
    """Its own weight is trained too, to see its gradient."""
    made = LoraLinear(
        cast("nn.Linear", plain_head(weight)),
        parts={"lm_head": MANY},
        adapted=["lm_head"],
        rank=RANK,
        scale=0.5,
        dropout={"lm_head": Dropout(dropout, "lm_head")},
        normed=normed,
    )
    rng = torch.Generator().manual_seed(1)
    for factors in (made.lora_A, made.lora_B):
        [factor] = factors.values()
        factor.data = torch.randn(factor.shape, generator=rng).mul(0.02)
    if normed == "dora":
        [magnitude] = made.lora_magnitude.values()
        made.init_magnitudes()
        magnitude.data *= 1 + 0.1 * torch.rand(MANY, generator=rng)
    made.bfloat16().weight.requires_grad_()
    return made


HEADS_OF = {
    "plain": plain_head,
    "adapted": adapted_head,
    "normed": partial(adapted_head, normed="dora"),
    "normed, dropping": partial(adapted_head, normed="dora", dropout=0.5),
}


def lengths(head: nn.Module, tokens: int, loss: Loss, *, is_summed: bool = True) -> list[float]:
    """Of the gradients of a mean over so many tokens, beside those in fp64 without dropout; or,
    where something is dropped, beside their own in fp32."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS_MOST, 48, generator=rng)[:tokens].bfloat16().requires_grad_()
    labels = torch.randint(0, MANY, (TOKENS_MOST,), generator=rng)[:tokens]

    def gradients(head: nn.Module, hidden: torch.Tensor, loss: Loss) -> list[torch.Tensor]:
        hidden = hidden.detach().requires_grad_()
        head.zero_grad()
        with dropout_rng(DropoutRNG(3, 0, torch.arange(tokens))):
            if is_summed:
                sum_cross_entropy(hidden, head, labels, loss, scale=1 / tokens).backward()
            else:
                (-token_log_probs(hidden, head, labels, loss).sum() / tokens).backward()
        return [grad_of(one) for one in (hidden, *head.parameters())]

    exact = gradients(deepcopy(head).double(), hidden.double(), loss)
    found = gradients(head, hidden, loss)
    return [along(*pair) for pair in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("kind", "loss", "is_summed"),
    [
        ("plain", Loss(chunk=1000), True),
        ("plain", Loss(chunk=100), True),
        ("plain", Loss(LossOptions(z=1e-3, smoothing=0.1), chunk=1000), True),
        ("plain", Loss(chunk=1000), False),
        ("plain", Loss(mode="eager"), True),
        ("plain", Loss(mode="eager"), False),
        ("plain", Loss(LossOptions(z=1e-3, smoothing=0.1), mode="eager"), True),
        ("adapted", Loss(mode="eager"), True),
        ("normed", Loss(mode="eager"), True),
        ("normed", Loss(chunk=1000), True),
        ("normed", Loss(chunk=100), True),
        ("normed", Loss(chunk=1000), False),
        ("normed, dropping", Loss(chunk=1000), True),
    ],
)
def test_bf16_gradients_are_as_long_for_any_number_of_tokens(
    kind: str, loss: Loss, is_summed: bool
) -> None:
    """Rounded to bf16 before they are divided by 513 they would be those divided by 512."""
    rng = torch.Generator().manual_seed(2)
    head = HEADS_OF[kind](torch.randn(MANY, 48, generator=rng).mul(0.02).bfloat16())
    # Divided by a power of 2 nothing is rounded that was not before.
    reference = lengths(head, 512, loss, is_summed=is_summed)
    for tokens in (511, 513, 514):
        found = lengths(head, tokens, loss, is_summed=is_summed)
        assert found[:2] == pytest.approx(reference[:2], abs=1e-4), tokens
        # An adapter has too few numbers for what each is rounded by to cancel out.
        assert found[2:] == pytest.approx(reference[2:], abs=1e-3), tokens
