"""The chunked loss, judged by one plain cross-entropy over all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from penstock.losses.cross_entropy import sum_cross_entropy

TOKENS, WIDTH, VOCAB = 53, 16, 41


def setting(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, WIDTH, generator=generator))
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.4] = -100
    return hidden.to(dtype).requires_grad_(), head.to(dtype), labels


def plain(hidden, head, labels):
    return F.cross_entropy(head(hidden).float(), labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("form", ["a matrix", "a matrix and more"])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk, form):
    hidden, head, labels = setting()
    call = head if form == "a matrix" else nn.Sequential(head)
    got = sum_cross_entropy(hidden, call, labels, chunk=chunk)
    want = plain(hidden, head, labels)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    inputs = (hidden, head.weight)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), rtol=1e-5, atol=1e-5
    )


def test_bf16_logits_are_softmaxed_in_fp32():
    hidden, head, labels = setting(torch.bfloat16)
    got = sum_cross_entropy(hidden, head, labels, chunk=5)
    assert got.dtype == torch.float32
    # The head's products are rounded to bf16 in both; nothing after them is.
    torch.testing.assert_close(got, plain(hidden, head, labels), rtol=1e-6, atol=0)


def test_without_a_trained_token_the_loss_is_zero_and_gradients_are_zeros():
    hidden, head, labels = setting()
    loss = sum_cross_entropy(hidden, head, torch.full_like(labels, -100))
    assert loss.item() == 0
    weight, stream = torch.autograd.grad(loss, (head.weight, hidden))
    assert torch.equal(weight, torch.zeros_like(head.weight))
    assert torch.equal(stream, torch.zeros_like(hidden))


class Largest(TorchDispatchMode):
    """The most numbers that any operation's result had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *found])
        return made


@pytest.mark.parametrize("form", ["a matrix", "a matrix and more"])
def test_logits_of_more_than_a_chunk_are_never_made(form):
    hidden, head, labels = setting()
    call = head if form == "a matrix" else nn.Sequential(head)
    with Largest() as largest:
        sum_cross_entropy(hidden, call, labels, chunk=8).backward()
    assert largest.numbers == max(head.weight.numel(), hidden.numel(), 8 * VOCAB)


def test_each_trained_token_passes_a_matrix_once_and_the_others_never():
    hidden, head, labels = setting()
    trained = int((labels != -100).sum())
    with FlopCounterMode(display=False) as counted:
        sum_cross_entropy(hidden, head, labels, chunk=8).backward()
    # Two products for the gradients, and one for the logits they come from.
    assert counted.get_total_flops() == 3 * 2 * trained * WIDTH * VOCAB


def test_labels_that_are_not_one_per_position_are_refused():
    hidden, head, labels = setting()
    with pytest.raises(ValueError, match="labels for"):
        sum_cross_entropy(hidden, head, labels[:-1])
    with pytest.raises(ValueError, match="chunk is 0"):
        sum_cross_entropy(hidden, head, labels, chunk=0)
