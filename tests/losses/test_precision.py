"""Logits in fp32 of hidden states and weights in bf16, judged by products in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.lora import LoraLinear
from penstock.losses.cross_entropy import Loss, logits_of, sum_cross_entropy, token_log_probs
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.quantised import QuantisedLinear
from penstock_kernels.cross_entropy import Terms
from penstock_kernels.quant import FORMATS, dequantise, quantise

TOKENS, WIDTH, VOCAB, RANK = 53, 32, 41, 3


def numbers(*shape):
    """Of which bf16 has each."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return noise.bfloat16().float()


def plain():
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(numbers(VOCAB, WIDTH))
    return head, head.weight.detach()


def adapted():
    head, weight = plain()
    head = LoraLinear(
        head,
        parts={"lm_head": VOCAB},
        adapted=["lm_head"],
        rank=RANK,
        scale=0.5,
        dropout={"lm_head": Dropout(0.0, "lm_head")},
    )
    # Few numbers, of few bits: bf16 has their products with hidden states too.
    head.lora_A["lm_head"] = nn.Parameter(torch.eye(RANK, WIDTH))
    head.lora_B["lm_head"] = nn.Parameter(numbers(VOCAB, RANK))
    more = head.lora_B["lm_head"] @ head.lora_A["lm_head"]
    return head, weight + 0.5 * more.detach()


def quantised():
    head, weight = plain()
    codes = quantise(weight, FORMATS["nf4"])
    made = QuantisedLinear(head, FORMATS["nf4"])
    for name, raw in codes.as_bytes().items():
        made.get_parameter(f"weight.{name}").data.copy_(raw)
    return made, dequantise(codes, torch.float32)


HEADS = {"plain": plain, "adapted": adapted, "quantised": quantised}


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
        if not casting and kind != "quantised":
            head = head.bfloat16()
        elif kind != "quantised":
            head = head.float()
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
        return torch.cat([logits_of(x, head.bfloat16(), "fp32")] * 2, dim=-1)

    got = logits_of(hidden, halves, "fp32")
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


@pytest.mark.parametrize("kind", ["summed", "in several chunks", "log-probabilities", "with terms"])
def test_bf16_gradients_are_as_long_for_any_number_of_tokens(kind: str) -> None:
    """Rounded to bf16 before they are divided by 513 they would be those divided by 512."""

    def lengths(tokens: int) -> list[float]:
        rng = torch.Generator().manual_seed(0)
        hidden = torch.randn(514, 48, generator=rng)[:tokens].bfloat16().requires_grad_()
        head = nn.Linear(48, 2048, bias=False, dtype=torch.bfloat16)
        head.weight = nn.Parameter(torch.randn(2048, 48, generator=rng).mul(0.02).bfloat16())
        labels = torch.randint(0, 2048, (514,), generator=rng)[:tokens]
        terms = Terms(z=1e-3, smoothing=0.1) if kind == "with terms" else Terms()
        loss = Loss(terms, chunk=100 if kind == "in several chunks" else 1000)
        if kind == "log-probabilities":
            (-token_log_probs(hidden, head, labels, loss).sum() / tokens).backward()
        else:
            sum_cross_entropy(hidden, head, labels, loss, scale=1 / tokens).backward()
        exact = [one.detach().double().requires_grad_() for one in (hidden, head.weight)]
        logits = exact[0] @ exact[1].T
        true = F.cross_entropy(logits, labels, label_smoothing=terms.smoothing)
        (true + terms.z * logits.logsumexp(1).square().mean()).backward()
        pairs = zip((hidden, head.weight), exact, strict=True)
        return [along(grad_of(found), grad_of(wanted)) for found, wanted in pairs]

    # Divided by a power of 2 nothing is rounded that was not before.
    reference = lengths(512)
    for tokens in (511, 513, 514):
        assert lengths(tokens) == pytest.approx(reference, abs=1e-4), tokens
