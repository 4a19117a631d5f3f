"""route on Triton: a kernel that scores, selects and normalizes, and one for its gradient.

T tokens, E experts, K experts per token. A program has a few tokens with all their experts.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2

ELEMENTS = 1024
"""Scores that a program holds."""


@triton.jit
def _score(logits, SIGMOID: tl.constexpr):
    """Scores of logits, which are -inf past the experts, where scores are 0."""
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores /= tl.sum(scores, axis=1)[:, None]
    return scores


# T varies by micro-batch, and Triton compiles anew for a multiple of 16.
@triton.jit(do_not_specialize=["T"])
def _route(
    logits_ptr,
    bias_ptr,
    choice_ptr,
    weights_ptr,
    T,
    E,
    K,
    norm_eps,
    scale,
    num_groups,
    group_size,
    groups_per_token,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Choices and weights of ROWS tokens; `GROUP_SCORE` is "" where all groups are chosen from."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Groups are padded to a power of 2 each, so that they can be a dimension.
    lanes = tl.arange(0, GROUPS * GROUP_SIZE)
    group, within = lanes // GROUP_SIZE, lanes % GROUP_SIZE
    expert = group * group_size + within
    is_expert = (group < num_groups) & (within < group_size)
    offs = tokens.to(tl.int64)[:, None] * E + expert[None, :]
    inside = (tokens < T)[:, None] & is_expert[None, :]
    logits = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    # A row past the tokens would be NaN.
    logits = tl.where((tokens < T)[:, None], logits, 0)
    scores = _score(logits, SIGMOID)
    preferences = scores
    if bias_ptr is not None:
        preferences += tl.load(bias_ptr + expert, mask=is_expert, other=0).to(tl.float32)[None, :]
    preferences = tl.where(is_expert[None, :], preferences, float("-inf"))
    if GROUP_SCORE != "":
        grouped = preferences.reshape(ROWS, GROUPS, GROUP_SIZE)
        best = tl.max(grouped, axis=2)
        if GROUP_SCORE == "best_two":
            first = tl.argmax(grouped, axis=2)
            is_first = tl.arange(0, GROUP_SIZE)[None, None, :] == first[:, :, None]
            best += tl.max(tl.where(is_first, float("-inf"), grouped), axis=2)
        groups = tl.arange(0, GROUPS)[None, :]
        is_open = tl.zeros([ROWS, GROUPS], dtype=tl.int32)
        for _ in range(0, groups_per_token):
            is_best = groups == tl.argmax(best, axis=1)[:, None]
            is_open = tl.where(is_best, 1, is_open)
            best = tl.where(is_best, float("-inf"), best)
        # Not 0: with a negative bias, experts of chosen groups may score less than that.
        grouped = tl.where(is_open[:, :, None] > 0, grouped, float("-inf"))
        preferences = grouped.reshape(ROWS, GROUPS * GROUP_SIZE)
    choices = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros([ROWS, CHOICES], dtype=tl.int32)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for k in range(0, K):
        best_lane = tl.argmax(preferences, axis=1)
        is_best = lanes[None, :] == best_lane[:, None]
        number = best_lane // GROUP_SIZE * group_size + best_lane % GROUP_SIZE
        weight = tl.sum(tl.where(is_best, scores, 0), axis=1)
        chosen = tl.where(choices == k, number[:, None], chosen)
        weights = tl.where(choices == k, weight[:, None], weights)
        preferences = tl.where(is_best, float("-inf"), preferences)
    if NORMALIZED:
        weights /= (tl.sum(weights, axis=1) + norm_eps)[:, None]
    out = tokens.to(tl.int64)[:, None] * K + choices
    is_choice = (tokens < T)[:, None] & (choices < K)
    tl.store(choice_ptr + out, chosen, mask=is_choice)
    tl.store(weights_ptr + out, weights * scale, mask=is_choice)


@triton.jit(do_not_specialize=["T"])
def _route_gradient(
    logits_ptr,
    choice_ptr,
    dweights_ptr,
    dlogits_ptr,
    T,
    E,
    K,
    norm_eps,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The logits' gradient, from scores that are computed again."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < T
    experts = tl.arange(0, EXPERTS)[None, :]
    offs = tokens.to(tl.int64)[:, None] * E + experts
    inside = is_token[:, None] & (experts < E)
    logits = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _score(tl.where(is_token[:, None], logits, 0), SIGMOID)
    total = tl.zeros([ROWS], dtype=tl.float32)
    product = tl.zeros([ROWS], dtype=tl.float32)
    dscores = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    is_chosen = tl.zeros([ROWS, EXPERTS], dtype=tl.int1)
    for k in range(0, K):
        out = tokens.to(tl.int64) * K + k
        choice = tl.load(choice_ptr + out, mask=is_token, other=0)
        dweight = tl.load(dweights_ptr + out, mask=is_token, other=0).to(tl.float32) * scale
        is_choice = experts == choice[:, None]
        is_chosen |= is_choice
        score = tl.sum(tl.where(is_choice, scores, 0), axis=1)
        total += score
        product += score * dweight
        dscores += tl.where(is_choice, dweight[:, None], 0)
    if NORMALIZED:
        # d (s_k / n) = ds_k / n - s_k dn / n^2, where n sums the chosen scores.
        total += norm_eps
        dscores = (dscores - (product / total)[:, None]) / total[:, None]
        dscores = tl.where(is_chosen, dscores, 0)
    if SIGMOID:
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - tl.sum(scores * dscores, axis=1)[:, None])
    tl.store(dlogits_ptr + offs, dlogits, mask=inside)


@triton.jit(do_not_specialize=["T", "num_rows"])
def _route_stats(
    logits_ptr,
    choice_ptr,
    row_ptr,
    partial_ptr,
    T,
    E,
    K,
    num_rows,
    SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Sums over some tokens, of each packed row: counts and shares of experts, and squares."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < T
    experts = tl.arange(0, EXPERTS)
    offs = tokens.to(tl.int64)[:, None] * E + experts[None, :]
    is_expert = experts < E
    inside = is_token[:, None] & is_expert[None, :]
    logits = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    logits = tl.where(is_token[:, None], logits, 0)
    shares = _score(logits, SIGMOID)
    if SIGMOID:
        shares /= tl.sum(shares, axis=1)[:, None]
    largest = tl.max(logits, axis=1)
    log_sum = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), axis=1))
    counts = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    for k in range(0, K):
        choice = tl.load(choice_ptr + tokens.to(tl.int64) * K + k, mask=is_token, other=-1)
        counts += (experts[None, :] == choice[:, None]).to(tl.float32)
    row = tl.load(row_ptr + tokens, mask=is_token, other=0)
    for number in range(0, num_rows):
        is_own = row == number + 1
        part = tl.program_id(0).to(tl.int64) * num_rows + number
        sums = partial_ptr + part * (2 * E + 1)
        own_counts = tl.sum(tl.where(is_own[:, None], counts, 0), axis=0)
        own_shares = tl.sum(tl.where(is_own[:, None], shares, 0), axis=0)
        tl.store(sums + experts, own_counts, mask=is_expert)
        tl.store(sums + E + experts, own_shares, mask=is_expert)
        tl.store(sums + 2 * E, tl.sum(tl.where(is_own, log_sum * log_sum, 0), axis=0))


def tile(lanes: int) -> dict[str, int]:
    """How many tokens a program has, of so many scores each."""
    return {"ROWS": max(1, ELEMENTS // lanes)}


def _routed(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    experts_per_token: int,
    scoring: str,
    normalized: bool,
    norm_eps: float,
    num_groups: int,
    groups_per_token: int,
    group_score: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    choice_TK, weights_TK = _routed_fake(logits_TE, bias_E, experts_per_token)
    T, E = logits_TE.shape
    if num_groups == groups_per_token:
        num_groups, groups_per_token, group_score = 1, 1, ""
    group_size = E // num_groups
    groups, padded_size = next_power_of_2(num_groups), next_power_of_2(group_size)
    sizes = tile(groups * padded_size)
    if T:
        _route[(cdiv(T, sizes["ROWS"]),)](
            logits_TE.contiguous(),
            None if bias_E is None else bias_E.contiguous(),
            *(choice_TK, weights_TK, T, E, experts_per_token, norm_eps, scale),
            *(num_groups, group_size, groups_per_token),
            SIGMOID=scoring == "sigmoid",
            NORMALIZED=normalized,
            GROUP_SCORE=group_score,
            GROUPS=groups,
            GROUP_SIZE=padded_size,
            CHOICES=next_power_of_2(experts_per_token),
            **sizes,
        )
    return choice_TK, weights_TK


def _routed_fake(
    logits_TE: torch.Tensor, _: torch.Tensor | None, experts_per_token: int, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits_TE.shape[0], experts_per_token
    choice_TK = logits_TE.new_empty(shape, dtype=torch.int64)
    return choice_TK, logits_TE.new_empty(shape, dtype=torch.float32)


def _gradient(
    logits_TE: torch.Tensor,
    choice_TK: torch.Tensor,
    dweights_TK: torch.Tensor,
    scoring: str,
    normalized: bool,
    norm_eps: float,
    scale: float,
) -> torch.Tensor:
    dlogits_TE = _gradient_fake(logits_TE)
    T, E = logits_TE.shape
    experts = next_power_of_2(E)
    sizes = tile(experts)
    if T:
        _route_gradient[(cdiv(T, sizes["ROWS"]),)](
            *(logits_TE.contiguous(), choice_TK, dweights_TK.contiguous(), dlogits_TE),
            *(T, E, choice_TK.shape[1], norm_eps, scale),
            SIGMOID=scoring == "sigmoid",
            NORMALIZED=normalized,
            EXPERTS=experts,
            **sizes,
        )
    return dlogits_TE


def _gradient_fake(logits_TE: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits_TE.new_empty(logits_TE.shape)


_gradient_of = operator("route_gradient", _gradient, fake=_gradient_fake)


def _back(ctx: Any, _: Any, dweights_TK: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dweights_TK is None:
        return (None,) * 10
    logits_TE, choice_TK = ctx.saved_tensors
    _, scoring, normalized, norm_eps, *_, scale = ctx.options
    options = scoring, normalized, norm_eps, scale
    return _gradient_of(logits_TE, choice_TK, dweights_TK, *options), *(None,) * 9


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[2:]
    ctx.save_for_backward(inputs[0], output[0])


_route_of = operator("route", _routed, fake=_routed_fake, keep=_keep, backward=_back)


def route(
    logits_TE: torch.Tensor,
    experts_per_token: int,
    *,
    scoring: str = "softmax",
    normalized: bool = True,
    norm_eps: float = 1e-20,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    groups_per_token: int = 1,
    group_score: str = "best_two",
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference; of experts that a token wants alike, it chooses the first."""
    return _route_of(
        *(logits_TE, bias_E, experts_per_token, scoring, normalized, norm_eps),
        *(num_groups, groups_per_token, group_score, scale),
    )


def route_stats(
    logits_TE: torch.Tensor,
    choice_TK: torch.Tensor,
    row_T: torch.Tensor,
    num_rows: int,
    *,
    scoring: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same as the reference, without gradients."""
    T, E = logits_TE.shape
    experts = next_power_of_2(E)
    sizes = tile(experts)
    blocks = cdiv(T, sizes["ROWS"])
    # fp32 holds the counts of a program's tokens, and those of up to 2^24.
    partial = logits_TE.new_empty(blocks, num_rows, 2 * E + 1, dtype=torch.float32)
    if partial.numel():
        _route_stats[(blocks,)](
            *(logits_TE.contiguous(), choice_TK.contiguous(), row_T.contiguous(), partial),
            *(T, E, choice_TK.shape[1], num_rows),
            SIGMOID=scoring == "sigmoid",
            EXPERTS=experts,
            **sizes,
        )
    sums = partial.sum(0)
    return sums[:, :E].long(), sums[:, E:-1], sums[:, -1]
