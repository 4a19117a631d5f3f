"""route: choices, weights and gradients are those of the routers of transformers' models."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from penstock_kernels.op import UnsupportedError
from penstock_kernels.route import route, route_stats
from tests.kernels.where import DEVICE, needs_triton

BACKENDS = ["eager", pytest.param("triton", marks=needs_triton)]
pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS, PER_TOKEN, TOKENS = 12, 3, 40

GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

# Their router, its config, what we say of the same.
ROUTERS = {
    "qwen3-moe": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, {}),
    "qwen3-moe-as-scored": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, {"normalized": False}),
    "mixtral": (MixtralTopKRouter, {}, {}),
    # The softmax of the chosen is that of all, normalized.
    "gpt-oss": (GptOssTopKRouter, {}, {}),
    "ernie": (Ernie4_5_MoeTopKRouter, {"moe_norm_min": 1e-12}, {"biased": True}),
    "glm4-moe": (
        Glm4MoeTopkRouter,
        {"norm_topk_prob": True, **GROUPED},
        {
            "scoring": "sigmoid",
            "biased": True,
            "num_groups": 4,
            "groups_per_token": 2,
            "scale": 2.5,
        },
    ),
    "glm4-moe-as-scored": (
        Glm4MoeTopkRouter,
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        {"scoring": "sigmoid", "biased": True, "normalized": False},
    ),
}


def their_router(kind, settings, bias_E):
    names = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "hidden_size": EXPERTS}
    router = kind(SimpleNamespace(num_experts_per_tok=PER_TOKEN, **names, **settings))
    with torch.no_grad():
        # So that what it is given are the logits.
        router.weight.copy_(torch.eye(EXPERTS))
        statics = getattr(router, "moe_statics", router)
        if hasattr(statics, "e_score_correction_bias"):
            statics.e_score_correction_bias.copy_(bias_E)
    return router


def laid_out(choice_TK, weights_TK):
    """The weight of every expert, [T, E]: choices have no order of their own."""
    return torch.zeros(len(choice_TK), EXPERTS).scatter(1, choice_TK, weights_TK)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "settings", "said"), ROUTERS.values(), ids=ROUTERS)
def test_choices_weights_and_gradients_are_those_of_transformers(kind, settings, said, backend):
    choose = route.backend(backend)
    generator = torch.Generator().manual_seed(0)
    logits_TE, dweights_TE = torch.randn(2, TOKENS, EXPERTS, generator=generator)
    bias_E = torch.rand(EXPERTS, generator=generator)
    given = {name: value for name, value in said.items() if name != "biased"}
    if said.get("biased"):
        given["bias_E"] = bias_E
        # Or nothing would show that it counts.
        unbiased = route(logits_TE, PER_TOKEN, **{**given, "bias_E": None})
        assert not torch.equal(laid_out(*unbiased) > 0, laid_out(*route(logits_TE, 3, **given)) > 0)
        given["bias_E"] = bias_E.to(DEVICE)
    theirs = logits_TE.clone().requires_grad_()
    ours = logits_TE.to(DEVICE, copy=True).requires_grad_()
    _, weights_TK, choice_TK = their_router(kind, settings, bias_E)(theirs)
    want_TE = laid_out(choice_TK, weights_TK)
    got_TE = laid_out(*(tensor.cpu() for tensor in choose(ours, PER_TOKEN, **given)))
    torch.testing.assert_close(got_TE, want_TE, atol=1e-6, rtol=1e-5)
    assert torch.equal(got_TE > 0, want_TE > 0)
    (want,) = torch.autograd.grad(want_TE, theirs, dweights_TE)
    (got,) = torch.autograd.grad(got_TE, ours, dweights_TE)
    torch.testing.assert_close(got.cpu(), want, atol=1e-6, rtol=1e-5)


def test_scores_are_computed_in_fp32_whatever_the_logits_are():
    logits_TE = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    choice_TK, weights_TK = route(logits_TE, PER_TOKEN)
    assert weights_TK.dtype == torch.float32
    assert torch.equal(weights_TK, route(logits_TE.float(), PER_TOKEN)[1])
    assert choice_TK.dtype == torch.int64


def by_hand(logits_E, count, scoring, normalized, bias_E, groups, scale):
    """One token's choice, in the order of preference, and its weights."""
    if scoring == "softmax":
        scores_E = logits_E.exp() / logits_E.exp().sum()
    else:
        scores_E = 1 / (1 + (-logits_E).exp())
    wanted = (scores_E + bias_E).tolist()
    num_groups, of_token = groups
    size = len(wanted) // num_groups
    runs = [range(at, at + size) for at in range(0, len(wanted), size)]
    if of_token < num_groups:
        runs.sort(key=lambda run: -sum(sorted(wanted[e] for e in run)[-2:]))
        runs = runs[:of_token]
    choice = sorted((expert for run in runs for expert in run), key=lambda e: -wanted[e])[:count]
    weights = scores_E[choice]
    return choice, (weights / weights.sum() if normalized else weights) * scale


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_random_routers_choose_and_weigh_as_plain_loops_do(backend):
    choose = route.backend(backend)
    for seed in range(120):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        num_groups = draw.choice((1, 1, 2, 4))
        experts = num_groups * draw.choice((2, 3, 5, 8))
        of_token = draw.randint(1, num_groups)
        count = draw.randint(1, of_token * experts // num_groups)
        tokens, dtype = draw.choice((0, 1, 7, 13)), draw.choice((torch.float32, torch.bfloat16))
        # Numbers that 16 bits hold, no two of them alike and none another's negative.
        order = torch.stack(
            [torch.randperm(experts, generator=generator) for _ in range(tokens + 1)]
        )
        logits_TE = (order[1:] - experts // 2).to(dtype) / 8 + 1 / 32
        bias_E = torch.rand(experts, generator=generator) if draw.random() < 0.5 else None
        scoring, normalized = draw.choice(("softmax", "sigmoid")), draw.random() < 0.5
        given = logits_TE.to(DEVICE, copy=True).requires_grad_()
        choice_TK, weights_TK = choose(
            given,
            count,
            scoring=scoring,
            normalized=normalized,
            bias_E=None if bias_E is None else bias_E.to(DEVICE),
            num_groups=num_groups,
            groups_per_token=of_token,
            scale=2.5,
        )
        assert choice_TK.shape == weights_TK.shape == (tokens, count)
        upstream_TK = torch.randn(tokens, count, generator=generator)
        (slope_TE,) = torch.autograd.grad(weights_TK, given, upstream_TK.to(DEVICE))
        choice_TK, weights_TK, slope_TE = (
            tensor.cpu() for tensor in (choice_TK, weights_TK, slope_TE)
        )
        added = torch.zeros(experts) if bias_E is None else bias_E.double()
        for token in range(tokens):
            exact = logits_TE[token].double().requires_grad_()
            settings = scoring, normalized, added, (num_groups, of_token), 2.5
            choice, weights = by_hand(exact, count, *settings)
            assert choice_TK[token].tolist() == choice, seed
            torch.testing.assert_close(weights_TK[token], weights.float(), atol=0, rtol=1e-5)
            (slope,) = torch.autograd.grad(weights, exact, upstream_TK[token].double())
            # A slope is the difference of larger numbers, and is rounded to the logits' dtype, or
            # cut off in Triton's interpreter.
            rtol = 1e-5 if dtype == torch.float32 else 2**-8 if backend == "eager" else 2**-7
            torch.testing.assert_close(slope_TE[token].double(), slope, atol=2e-6, rtol=rtol)


@needs_triton
def test_triton_chooses_as_the_reference_does_by_the_best_of_a_group_and_among_many_experts():
    cases: list[tuple[int, dict[str, Any]]] = [
        (60, {"num_groups": 6, "groups_per_token": 2, "group_score": "best", "scoring": "softmax"}),
        (384, {"scoring": "sigmoid", "scale": 2.827}),
        (128, {"norm_eps": 0.1}),
    ]
    for experts, settings in cases:
        logits_TE = torch.randn(37, experts, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        results = [
            route.backend(backend)(logits_TE, 8, **settings) for backend in ("eager", "triton")
        ]
        torch.testing.assert_close(*results)


@needs_triton
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [0, 150])
def test_statistics_of_rows_are_those_of_the_reference(scoring, tokens):
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(tokens, 60, generator=generator)
    choice_TK = torch.rand(tokens, 60, generator=generator).topk(4).indices
    # Row 0 is padding, and row 3 has no tokens.
    row_T = torch.randint(0, 3, (tokens,), generator=generator)
    given = logits_TE.to(DEVICE), choice_TK.to(DEVICE), row_T.to(DEVICE), 3
    mine = route_stats.backend("triton")(*given, scoring=scoring)
    torch.testing.assert_close(mine, route_stats.reference(*given, scoring=scoring))
    given[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="logits need a gradient"):
        route_stats.backend("triton")(*given)


def test_a_router_without_as_many_experts_is_refused():
    if "triton" not in route.backends:
        pytest.skip("triton is not published for this system")
    with pytest.raises(UnsupportedError, match=r"logits are \(2, 4\), to choose 5 experts"):
        route.backend("triton")(torch.ones(2, 4), 5)
    with pytest.raises(UnsupportedError, match="5 experts are in 2 groups"):
        route.backend("triton")(torch.ones(2, 5), 1, num_groups=2)
