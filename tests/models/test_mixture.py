"""Models with experts are transformers' models, whatever computes the experts."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from penstock.losses.balance import entropy, imbalance, load_balancing_loss, summed, z_loss
from penstock.models.layers.experts import operations_of
from penstock.models.layers.router import Router
from penstock.models.shape import ExpertsConfig
from tests.models.stored import to_hf
from tests.models.twins import (
    SPARSE,
    as_stored,
    assert_gradients_equal,
    documents,
    gradients,
    hf_model,
    ours_with,
    packed_logits,
    packed_loss,
    their_logits,
    their_loss,
    twins,
)


def assert_same_model(theirs, ids, labels, implementations, *, within=""):
    """Logits, loss, and the gradients of the tensors whose names have `within` in them."""
    expected = their_loss(theirs, ids, labels)
    theirs.zero_grad()
    expected.backward()
    wanted = as_stored(theirs, gradients(theirs))
    with torch.no_grad():
        logits = torch.cat([their_logits(theirs, document) for document in ids])
    for implementation in implementations:
        pair = ours_with(theirs, merge_qkv=True, experts=operations_of(implementation))
        with torch.no_grad():
            torch.testing.assert_close(packed_logits(pair.ours, ids), logits, atol=1e-5, rtol=1e-5)
        loss = packed_loss(pair.ours, ids, labels)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        seen = {}
        for name, gradient in gradients(pair.ours).items():
            seen |= to_hf(pair.weights, name, gradient)
        assert_gradients_equal(
            *({n: g for n, g in one.items() if within in n} for one in (seen, wanted))
        )


@pytest.mark.parametrize("family", SPARSE)
def test_logits_loss_and_every_gradient_are_those_of_transformers(family):
    assert_same_model(hf_model(family, tied=False), *documents(), ["eager", "native"])


@pytest.mark.slow
def test_triton_computes_the_model_of_transformers():
    ids, labels = documents([9, 4])
    assert_same_model(hf_model("qwen3_moe", tied=False), ids, labels, ["triton"])


def ragged():
    """A model whose selection bias decides alone: one expert has every token, the others none."""
    # Not normalised: the weight of a single choice would be 1, and the router's gradient noise.
    choice = {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    theirs = hf_model("glm4_moe", tied=False, **choice)
    for name, bias in theirs.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(9.0 * (torch.arange(8) == 3))
    return theirs


def test_one_expert_may_get_all_tokens_and_the_others_none():
    theirs = ragged()
    assert_same_model(theirs, *documents(), ["eager", "native"])
    chosen = [p.grad for n, p in theirs.named_parameters() if n.endswith("experts.down_proj")]
    for gradient in chosen:
        assert gradient is not None
        assert gradient.flatten(1).any(1).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_one_token_may_be_all_there_is():
    theirs, one = hf_model("glm4_moe", tied=False), [torch.tensor([5])]
    # What a token that sees itself alone looks for has no gradient but noise.
    assert_same_model(theirs, one, [torch.tensor([7])], ["eager", "native"], within=".mlp.")


def test_losses_over_what_routers_saw_are_those_of_transformers():
    pair = twins("mixtral", experts=operations_of("eager"))
    routers = pair.ours.routers()
    for router in routers.values():
        router.watches = True
    ids, _ = documents()
    with torch.no_grad():
        seen = []
        for document in (ids[:2], ids[2:]):
            packed_logits(pair.ours, document)
            seen += [router.seen for router in routers.values()]
        theirs = [
            pair.theirs(input_ids=d[None], use_cache=False, output_router_logits=True).router_logits
            for d in ids
        ]
    logits = tuple(torch.cat(layer) for layer in zip(*theirs, strict=True))
    total = summed(seen)
    torch.testing.assert_close(
        load_balancing_loss(total.frequencies_E, total.shares_E),
        load_balancing_loss_func(logits, num_experts=5, top_k=2),  # pyright: ignore[reportArgumentType]
    )
    torch.testing.assert_close(z_loss(total), torch.cat(logits).logsumexp(-1).square().mean())
    assert total.counts_E.sum() == 2 * total.num_tokens == 2 * len(torch.cat(logits))


def penalised(model, ids, labels, recomputed):
    """Gradients with losses of routers, and what these saw, by the sockets' ways."""
    model = copy.deepcopy(model)
    for router in model.routers().values():
        router.penalty = lambda seen: (
            3 * load_balancing_loss(seen.frequencies_E, seen.shares_E) + 0.1 * z_loss(seen)
        )
    if recomputed:
        # The first layer's input wants no gradient, which the reentrant kind would stop at.
        model.model.embed_tokens.requires_grad_()
        model.run_layer = lambda module, *args: checkpoint(
            module, *args, use_reentrant=recomputed == "reentrant"
        )
    loss = packed_loss(model, ids, labels)
    seen = [router.seen for router in model.routers().values()]
    loss.backward()
    again = [router.seen for router in model.routers().values()]
    for one, other in zip(seen, again, strict=True):
        assert torch.equal(one.counts_E, other.counts_E)
    return loss.detach(), gradients(model)


def test_a_penalty_joins_every_gradient_and_recomputation_does_not_double_it():
    pair = twins("qwen3_moe", experts=operations_of("eager"))
    ids, labels = documents()
    inputs = {}
    routers = pair.ours.routers()
    for number, router in routers.items():
        router.register_forward_hook(lambda _, args, __, at=number: inputs.update({at: args[0]}))
    # By hand: the loss and the penalties as one sum.
    total = plain = packed_loss(pair.ours, ids, labels)
    for number, router in routers.items():
        logits = inputs[number] @ router.weight.T
        chosen = logits.topk(3).indices
        frequencies = torch.bincount(chosen.flatten(), minlength=8) / len(logits)
        balance = 8 * (frequencies * logits.softmax(-1).mean(0)).sum()
        total = total + 3 * balance + 0.1 * logits.logsumexp(-1).square().mean()
    total.backward()
    wanted = gradients(pair.ours)
    for recomputed in (None, "plain", "reentrant"):
        loss, got = penalised(pair.ours, ids, labels, recomputed)
        torch.testing.assert_close(loss, plain.detach())
        assert_gradients_equal(got, wanted)


def test_routers_that_nobody_asks_keep_nothing():
    pair = twins("qwen3_moe")
    packed_logits(pair.ours, documents()[0])
    assert all(router.seen is None for router in pair.ours.routers().values())


@pytest.mark.parametrize("precision", ["fp32", "model"])
def test_a_router_rounds_logits_only_if_it_is_told_to(precision):
    generator = torch.Generator().manual_seed(1)
    config = ExpertsConfig((0,), num_experts=16, experts_per_token=4, width=8)
    router = Router(config, 64, precision=precision)
    weight = torch.randn(16, 64, generator=generator)
    with torch.no_grad():
        router.weight.copy_(weight)
    x = torch.randn(200, 64, generator=generator).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        _, weights = router(x)
    exact = (x.double() @ weight.double().T).softmax(-1).topk(4).values
    error = (weights - exact / exact.sum(-1, keepdim=True)).abs().max()
    assert (error < 1e-5) == (precision == "fp32")
    assert router.is_exact == (precision == "fp32")


def test_even_use_is_1_and_the_use_of_one_expert_is_as_uneven_as_can_be():
    even, one = torch.tensor([5, 5, 5, 5]), torch.tensor([0, 12, 0, 0])
    assert (imbalance(even), imbalance(one)) == (1, 4)
    assert (entropy(even), entropy(one)) == pytest.approx((1, 0))
    assert entropy(torch.tensor([6, 6, 0, 0])) == pytest.approx(0.5)
