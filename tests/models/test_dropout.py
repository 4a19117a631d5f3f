"""Dropout in a model: where it falls, judged by transformers with the same draws, and on what."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from penstock.engine.activations.checkpointing import (
    IMPLEMENTATIONS,
    apply_activation_checkpointing,
)
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.layers.attention import SelfAttention
from penstock.models.layers.dropout import Dropout, DropoutRates, DropoutRNG, dropout_rng
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.dropout.reference import keep_mask
from tests.models.twins import (
    assert_gradients_equal,
    documents,
    gradients,
    packed_logits,
    packed_loss,
    positions,
    their_loss,
    twins,
)

RATE = 0.4


def noise_of(ids, *, step=0, first_row=0):
    """Each document a row of its own."""
    places = [
        (row << 32) + torch.arange(len(document)) for row, document in enumerate(ids, first_row)
    ]
    return DropoutRNG(seed=3, step=step, token_indices_T=torch.cat(places))


def drops(rate, site, ids, step):
    """A hook for transformers' modules that drops as the site does; they see one document after
    another."""
    dropout = Dropout(rate, site)
    noises = cycle(
        [noise_of([document], step=step, first_row=row) for row, document in enumerate(ids)]
    )

    def hook(_module, _arguments, output):
        with dropout_rng(next(noises)):
            if isinstance(output, tuple):
                return dropout(output[0][0])[None], *output[1:]
            return dropout(output[0])[None]

    return hook


RISING = DropoutRates(RATE, RATE, warmup_steps=4, depth="rising")
# Of three layers.
BY_STEP = {
    "as written": (DropoutRates(RATE), 0, (RATE, RATE, RATE)),
    "in the first step of a rise": (DropoutRates(RATE, warmup_steps=4), 0, (0, 0, 0)),
    "in a rise": (DropoutRates(RATE, warmup_steps=4), 3, (0.3, 0.3, 0.3)),
    "in a rise, by depth": (RISING, 1, (0, 0.1 / 3, 0.2 / 3)),
    "after it": (RISING, 4, (0, 0.4 / 3, 0.8 / 3)),
    "long after it": (RISING, 9, (0, 0.4 / 3, 0.8 / 3)),
}


def test_weights_of_attention_are_dropped_as_transformers_drops_them(monkeypatch):
    """In each layer, with the draws of a document, a head, a query and a key."""
    dropping = DropoutRates(attention=RATE, depth="rising")
    pair = twins("qwen3", dropout=dropping)
    ids, labels = documents()
    layers = len(pair.theirs.model.layers)
    for number, layer in enumerate(pair.theirs.model.layers):
        layer.self_attn.attention_dropout = RATE * number / layers
    pair.theirs.set_attn_implementation("eager")
    seen = []

    def drop(weights, p, training):
        assert training
        row, number = divmod(len(seen), layers)
        seen.append(p)
        assert p == pytest.approx(RATE * number / layers)
        [document] = weights
        heads, length, _ = document.shape
        noise = noise_of([ids[row]], first_row=row)
        key = noise.key(f"model.layers.{number}.self_attn.weights")
        stays = keep_mask(noise.token_indices_T, heads * length, p, key).unflatten(
            1, (heads, length)
        )
        return (document * stays.transpose(0, 1) / (1 - p))[None]

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    theirs = their_loss(pair.theirs.train(), ids, labels)
    theirs.backward()
    assert len(seen) == layers * len(ids)
    with dropout_rng(noise_of(ids)):
        mine = packed_loss(pair.ours.train(), ids, labels)
    mine.backward()
    torch.testing.assert_close(mine, theirs)
    assert_gradients_equal(gradients(pair.ours), gradients(pair.theirs))
    plain = packed_loss(pair.ours, ids, labels)
    with dropout_rng(noise_of(ids)):
        assert torch.equal(packed_loss(pair.ours.eval(), ids, labels), plain)
    assert not torch.isclose(mine, plain)


@pytest.mark.parametrize(("dropping", "step", "rates"), BY_STEP.values(), ids=BY_STEP)
def test_what_layers_add_is_dropped_from_before_it_is_added(dropping, step, rates):
    pair = twins("qwen3", dropout=dropping)
    ids, labels = documents()
    for number, layer in enumerate(pair.theirs.model.layers):
        for part in ("self_attn", "mlp"):
            layer.get_submodule(part).register_forward_hook(
                drops(rates[number], f"model.layers.{number}.{part}", ids, step)
            )
        if dropping.ffn:
            # Of what down_proj is given; transformers has no module that gives it.
            drop = drops(rates[number], f"model.layers.{number}.mlp.act_fn", ids, step)
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda module, given, drop=drop: drop(module, given, given[0])
            )
    with dropout_rng(noise_of(ids, step=step)):
        mine = packed_loss(pair.ours, ids, labels)
    mine.backward()
    theirs = their_loss(pair.theirs, ids, labels)
    theirs.backward()
    torch.testing.assert_close(mine, theirs, atol=0, rtol=2e-6)
    assert_gradients_equal(gradients(pair.ours), gradients(pair.theirs))


def logits(model, ids, noise):
    with torch.no_grad(), dropout_rng(noise):
        return packed_logits(model, ids)


def test_a_token_draws_alike_in_whatever_company_and_otherwise_in_other_steps_rows_and_runs():
    model = twins("qwen3", dropout=DropoutRates(RATE)).ours
    ids, _ = documents()
    noise = noise_of(ids)
    whole = logits(model, ids, noise)
    alone = noise_of(ids[2:3], first_row=2)
    start = len(ids[0]) + len(ids[1])
    within = whole[start : start + len(ids[2])]
    torch.testing.assert_close(logits(model, ids[2:3], alone), within, atol=1e-5, rtol=1e-5)
    others = (
        replace(alone, step=1),
        replace(alone, seed=4),
        noise_of(ids[2:3], first_row=1),
    )
    for other in others:
        assert (logits(model, ids[2:3], other) - within).abs().max() > 0.1


def test_a_layer_drops_by_its_number_in_the_whole_model_whichever_part_of_it_is_here():
    whole = twins("qwen3", dropout=RISING).ours
    first = Decoder(whole.config, dropout=RISING, part=PipelineStageModules([0], has_head=False))
    second = Decoder(
        whole.config, dropout=RISING, part=PipelineStageModules([1, 2], has_embedding=False)
    )
    for part in (first, second):
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    ids, _ = documents()
    lengths = [len(document) for document in ids]
    place = positions(lengths), VarlenMetadata.of(lengths)
    with torch.no_grad(), dropout_rng(noise_of(ids, step=3)):
        found = second(first(torch.cat(ids), *place), *place)
    assert torch.equal(found, logits(whole, ids, noise_of(ids, step=3)))


def test_nothing_is_dropped_in_an_evaluation_or_without_a_noise():
    model, plain = (twins("qwen3", dropout=DropoutRates(rate)).ours for rate in (RATE, 0.0))
    ids, _ = documents()
    want = packed_logits(plain, ids)
    assert torch.equal(logits(model, ids, None), want)
    assert not torch.equal(logits(model, ids, noise_of(ids)), want)
    assert torch.equal(logits(model.eval(), ids, noise_of(ids)), want)


def test_an_evaluation_attends_as_a_model_does_that_drops_no_weights_of_attention():
    """Which is what keeps keys of earlier tokens, and not all weights of a document at once."""
    model = twins("qwen3", dropout=DropoutRates(attention=RATE)).ours
    ids, _ = documents()
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    calls = []
    for number, layer in enumerate(layers):

        def attend(*args, number=number, attend=layer.attend):
            calls.append(number)
            return attend(*args)

        layer.attend = attend
    logits(model.train(), ids, noise_of(ids))
    assert not calls
    logits(model.eval(), ids, noise_of(ids))
    assert calls == [*range(len(layers))]
    assert len(layers) > 1


@pytest.mark.parametrize("modules", [None, ["mlp", "self_attn"]], ids=["layers", "parts"])
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_what_is_computed_again_drops_what_it_dropped_before(kind, modules):
    ids, labels = documents()
    found = []
    for again in (False, True):
        model = twins("qwen3", dropout=RISING).ours
        if again:
            apply_activation_checkpointing(model, modules, kind)
        with dropout_rng(noise_of(ids, step=2)):
            loss = packed_loss(model, ids, labels)
        # As in a pipeline, where another micro-batch is on its way forward; the step tells it.
        with dropout_rng(noise_of(ids, step=9)):
            loss.backward()
        found.append(gradients(model))
    plain, repeated = found
    assert all(torch.equal(repeated[name], gradient) for name, gradient in plain.items())


def test_sites_are_called_alike_in_every_part_of_a_model():
    pair = twins("qwen3", dropout=DropoutRates(RATE))
    sites = [module.site for module in pair.ours.modules() if isinstance(module, Dropout)]
    assert len(set(sites)) == len(sites) == 3 * 4
    # By the names of transformers' modules, whatever ours are called.
    known = {name for name, _ in pair.theirs.named_modules()}
    assert {site.removesuffix(".weights") for site in sites} < known
