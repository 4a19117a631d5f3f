"""Cross-entropy of a head that is one matrix, with its gradients computed on the way forward.

Logits are needed for the loss and again for the gradients, and making them is a third of the work.
Here the gradients are made while a chunk's logits are there, so nothing is computed twice, and
what is kept for the backward pass is as large as what the head was given. Idea: Liger Kernel
(arXiv 2410.10989), section on fused linear cross-entropy.

S tokens, C those of a chunk, D model width, V vocabulary.
"""

from typing import Any

import torch

CHUNK_ON_CPU = 256
"""Tokens at a time on a CPU, at most: with more, passes over their logits wait for memory, and with
fewer, matrix products do."""


def linear_cross_entropy(
    hidden_SD: torch.Tensor, weight_VD: torch.Tensor, labels_S: torch.Tensor, *, chunk: int
) -> torch.Tensor:
    """The summed cross-entropy of `hidden @ weight.T`, a scalar in fp32; every token has a label.

    Products are in hidden's dtype, to which the weight is cast, and the softmax in fp32. At most
    `chunk` tokens' logits are held at a time.
    """
    weight_VD = weight_VD.to(hidden_SD.dtype)
    if not torch.is_grad_enabled():
        hidden_SD, weight_VD = hidden_SD.detach(), weight_VD.detach()
    return _Summed.apply(hidden_SD, weight_VD, labels_S, chunk)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_S: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_SD = torch.empty_like(hidden_SD) if wants_hidden else None
        grad_VD = torch.empty_like(weight_VD) if wants_weight else None
        largest = chunk if hidden_SD.device.type != "cpu" else min(chunk, CHUNK_ON_CPU)
        size = min(len(hidden_SD), largest)
        logits = hidden_SD.new_empty(size, len(weight_VD))
        # Made once: fresh memory for each chunk would cost a CPU as much as a pass over it.
        precise = logits if logits.dtype == torch.float32 else logits.float()
        total = precise.new_zeros(())
        for start in range(0, len(hidden_SD), size):
            hidden_CD = hidden_SD[start : start + size]
            label_C1 = labels_S[start : start + size, None]
            logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=logits[: len(hidden_CD)])
            share_CV = precise[: len(hidden_CD)]
            if precise is not logits:
                share_CV.copy_(logits_CV)
            total += _softmax_in_place(share_CV, label_C1)
            if grad_SD is None and grad_VD is None:
                continue
            share_CV.scatter_add_(1, label_C1, share_CV.new_full(label_C1.shape, -1.0))
            if precise is not logits:
                logits_CV.copy_(share_CV)
            if grad_SD is not None:
                torch.mm(logits_CV, weight_VD, out=grad_SD[start : start + size])
            if grad_VD is not None:
                # With a beta of 0 what was there does not count, not even as NaN.
                before = 1 if start else 0
                torch.addmm(grad_VD, logits_CV.t(), hidden_CD, beta=before, out=grad_VD)
        ctx.save_for_backward(grad_SD, grad_VD)
        return total

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        # Not in place: some pipeline schedules go back once for each of the two.
        grad_SD, grad_VD = (
            None if saved is None else saved * grads[0].to(saved.dtype)
            for saved in ctx.saved_tensors
        )
        return grad_SD, grad_VD, None, None


def _softmax_in_place(logits_CV: torch.Tensor, label_C1: torch.Tensor) -> torch.Tensor:
    """Turn logits into probabilities, and return the summed cross-entropy."""
    label_logit_C1 = logits_CV.gather(1, label_C1)
    largest_C1 = logits_CV.amax(1, keepdim=True)
    sum_C1 = logits_CV.sub_(largest_C1).exp_().sum(1, keepdim=True)
    logits_CV.mul_(sum_C1.reciprocal())
    return (sum_C1.log() + largest_C1 - label_logit_C1).sum()
