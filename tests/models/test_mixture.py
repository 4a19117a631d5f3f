"""Models with experts are transformers' models, whatever computes the experts."""

import copy

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from penstock.engine.activations.checkpointing import apply_activation_checkpointing
from penstock.engine.moe.routers import LocalRows, RouterStatsCollector
from penstock.losses.load_balancing import aux_loss_grad, entropy, imbalance, update_expert_bias
from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.experts import select_expert_ops
from penstock.models.layers.router import Router
from penstock.models.layers.router_observer import observe_routers
from tests.models.stored import to_hf
from tests.models.twins import (
    SPARSE,
    VARIANTS,
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
        pair = ours_with(theirs, merge_qkv=True, experts=select_expert_ops(implementation))
        with torch.no_grad():
            torch.testing.assert_close(packed_logits(pair.ours, ids), logits, atol=1e-5, rtol=1e-5)
        loss = packed_loss(pair.ours, ids, labels)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        seen = {}
        for name, gradient in gradients(pair.ours).items():
            seen |= to_hf(pair.weights, name, gradient)
        here, there = ({n: g for n, g in one.items() if within in n} for one in (seen, wanted))
        assert_gradients_equal(here, there)


@pytest.mark.parametrize("family", [*SPARSE, *VARIANTS])
def test_logits_loss_and_every_gradient_are_those_of_transformers(family):
    assert_same_model(hf_model(family, tied=False), *documents(), ["eager", "native"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_triton_computes_the_model_of_transformers(family):
    ids, labels = documents([9, 4])
    assert_same_model(hf_model(family, tied=False, num_hidden_layers=1), ids, labels, ["triton"])


def ragged():
    """A model whose selection bias decides alone: one expert has every token, the others none."""
    # Not normalized: the weight of a single choice would be 1, and the router's gradient noise.
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


LOAD, Z = 3.0, 0.1


def rows_of(ids, padding=0):
    """Two rows of two documents each, and padding."""
    sizes = [len(torch.cat(ids[:2])), len(torch.cat(ids[2:]))]
    row_T = torch.tensor([1, 2, 0]).repeat_interleave(torch.tensor([*sizes, padding]))
    return LocalRows(row_T, torch.tensor(sizes))


def watch_of(rows, *, load=0.0, z=0.0):
    total = int(rows.tokens_R.sum())
    return RouterStatsCollector(
        rows, lambda _, counts_RE: aux_loss_grad(counts_RE, rows.tokens_R), load / total, z / total
    )


def their_balance(pair, ids):
    """Transformers' loss of each row and layer, weighted by tokens, and the z-loss; over layers."""
    logits = [
        pair.theirs(input_ids=d[None], use_cache=False, output_router_logits=True).router_logits
        for d in ids
    ]
    balance = squares = torch.zeros(())
    for layer in zip(*logits, strict=True):
        for row in (torch.cat(layer[:2]), torch.cat(layer[2:])):
            loss = load_balancing_loss_func((row,), num_experts=row.shape[1], top_k=3)  # pyright: ignore[reportArgumentType]
            balance = balance + len(row) * loss
            squares = squares + row.logsumexp(-1).square().sum()
    return balance, squares


def penalized(pair, ids, labels, recomputed):
    """The loss, gradients with the losses of routers, and what a watch noted, by the engine's ways.

    Padding is routed as well, and must not count.
    """
    model = copy.deepcopy(pair.ours)
    if recomputed:
        apply_activation_checkpointing(model, None, recomputed)
    rest = torch.zeros(9, dtype=torch.int64)
    watch = watch_of(rows_of(ids, padding=9), load=LOAD, z=Z)
    with observe_routers(watch):
        loss = packed_loss(model, [*ids, rest], [*labels, rest - 100])
    noted = dict(watch.statistics)
    loss.backward()
    assert watch.statistics == noted, "a layer that is computed again was noted again"
    return loss.detach(), gradients(model), list(noted.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "granitemoe", "olmoe"])
def test_losses_of_routers_and_all_gradients_are_those_of_transformers_recomputed_or_not(family):
    pair = twins(family, experts=select_expert_ops("eager"))
    ids, labels = documents()
    plain = their_loss(pair.theirs, ids, labels)
    balance, squares = their_balance(pair, ids)
    tokens = len(torch.cat(ids))
    (plain + (LOAD * balance + Z * squares) / tokens).backward()
    wanted = as_stored(pair.theirs, gradients(pair.theirs))
    for recomputed in (None, "plain", "reentrant", "once"):
        loss, got, noted = penalized(pair, ids, labels, recomputed)
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-6, atol=0)
        sums = torch.stack(noted).sum(0)
        assert sums[: len(sums) // 2 - 1].sum() == len(noted) * 3 * tokens
        torch.testing.assert_close(sums[-2:].float(), torch.stack((balance, squares)).detach())
        found = {}
        for name, gradient in got.items():
            found |= to_hf(pair.weights, name, gradient)
        assert_gradients_equal(found, wanted)


def test_shares_of_a_row_on_several_ranks_add_up_to_its_loss():
    generator = torch.Generator().manual_seed(3)
    config = ExpertsConfig(
        (0,), num_experts=6, experts_per_token=2, intermediate_size=8, scoring="sigmoid"
    )
    router = Router(config, 16, precision="fp32")
    with torch.no_grad():
        router.weight.copy_(torch.randn(6, 16, generator=generator))
    x, row_T = torch.randn(40, 16, generator=generator), torch.arange(40) % 2 + 1
    tokens_R = torch.tensor([20, 20])

    def gradient(parts, pull):
        router.zero_grad()
        total = torch.zeros(14, dtype=torch.float64)
        for part in parts:
            watch = RouterStatsCollector(LocalRows(row_T[part], tokens_R), pull, 0.7, 0.2)
            with observe_routers(watch):
                # The weights' own gradient is none of this.
                (0 * router(x[part])[1].sum()).backward()
            total += watch.statistics[router]
        return gradients(router)["weight"].clone(), total

    whole, sums = gradient([slice(0, 40)], lambda _, counts_RE: aux_loss_grad(counts_RE, tokens_R))
    watch = RouterStatsCollector(LocalRows(row_T, tokens_R), None, 0, 0)
    with observe_routers(watch), torch.no_grad():
        choice, _ = router(x)
    counts_RE = torch.stack(
        [torch.bincount(choice[row_T == r].flatten(), minlength=6) for r in (1, 2)]
    )
    parts = [slice(0, 13), slice(13, 14), slice(14, 40)]
    cut, summed = gradient(parts, lambda *_: aux_loss_grad(counts_RE, tokens_R))
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(summed, sums)
    assert torch.equal(watch.statistics[router][:6].long(), counts_RE.sum(0))


@pytest.mark.parametrize("precision", ["fp32", "model"])
def test_a_router_rounds_logits_only_if_it_is_told_to(precision):
    generator = torch.Generator().manual_seed(1)
    config = ExpertsConfig((0,), num_experts=16, experts_per_token=4, intermediate_size=8)
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
    assert update_expert_bias(even, 0.1).tolist() == [0, 0, 0, 0]
    assert update_expert_bias(one, 0.1).tolist() == pytest.approx([0.1, -0.1, 0.1, 0.1])
