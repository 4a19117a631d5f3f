"""Losses of clients through a whole model, judged by autograd on the logits of transformers."""

import peft
import pytest
import torch
import transformers

from penstock.adapters.names import factor_of
from penstock.losses.policy import Told, sequence_losses, token_losses
from penstock.server.protocol.commands import Export
from penstock.server.protocol.losses import PARAMS
from penstock.server.protocol.values import Array
from penstock.server.worker.refusals import RefusedError
from tests.ranks import on_ranks
from tests.server.orders import (
    data,
    each_done,
    opening,
    operations,
    passing,
    stepping,
    write_model,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

NUMBERS = {"ppo": {"eps_clip_c": 3.0}, "drgrpo": {"kl_beta": 0.2}, "dro": {"beta": 0.3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def begun(model, tmp_path_factory):
    """Workers with a model that has learnt something, and the same in PEFT's hands."""
    out = tmp_path_factory.mktemp("begun")
    workers = operations(model, out)
    for order in (opening("a", 8), passing("a", data(4)), stepping("a", 0.05)):
        workers.do(order)
    workers.do(Export(model="a", folder=str(out / "sampler"), dtype="float32"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return workers, peft.PeftModel.from_pretrained(base, out / "sampler", is_trainable=True)


def given_for(loss, count=5):
    """Samples with the inputs of a loss; what is known of old log-probabilities is near -5, as
    those of the model are."""
    if loss == "cross_entropy":
        return data(count, seed=3)
    made = data(count, seed=3, advantages=1.0, logprobs=0.3)
    moved = []
    for datum in made:
        old = datum.inputs["logprobs"].numpy().astype("float32") - 5.8
        inputs = {**datum.inputs, "logprobs": Array.of(old, "float32")}
        moved.append(type(datum)(tokens=datum.tokens, inputs=inputs))
    return tuple(moved)


def judged(tuned, given, loss, params):
    """Log-probabilities, the sum of losses and PEFT's gradients."""
    tuned.zero_grad()
    known, total, found = {**PARAMS[loss], **params}, 0.0, []
    for datum in given:
        ids = torch.tensor(datum.tokens.numpy().astype("int64"))[None]
        its = {name: torch.tensor(array.numpy()) for name, array in datum.inputs.items()}
        logits = tuned(ids).logits[0].float()
        logp_T = logits.log_softmax(-1).gather(1, its["target_tokens"][:, None])[:, 0]
        zeros = torch.zeros_like(logp_T)
        old_T = its.get("logprobs", zeros)
        told = Told(
            its["weights"],
            old_T,
            its.get("advantages", zeros),
            old_T,
            zeros + known.get("clip_low_threshold", 0),
            zeros + known.get("clip_high_threshold", 0),
        )
        if loss == "gspo":
            loss_of = sequence_losses(logp_T, told, known, lambda x_T: x_T.sum()[None]).sum()
        else:
            loss_of = token_losses(loss, logp_T, told, known).sum()
        loss_of.backward()
        total += loss_of.item()
        found.append(logp_T.detach())
    return found, total


@pytest.mark.parametrize("loss", PARAMS)
def test_log_probabilities_losses_and_gradients_are_those_of_autograd(begun, loss):
    workers, tuned = begun
    given, params = given_for(loss), NUMBERS.get(loss, {})
    workers.residents.get("a").drop_gradients()
    passed = workers.do(passing("a", given, loss=loss, params=params))
    log_probs, total = judged(tuned, given, loss, params)
    assert passed.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    for outputs, theirs in zip(passed.outputs, log_probs, strict=True):
        mine = torch.tensor(outputs["logprobs"].numpy())
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)
    theirs = dict(tuned.named_parameters())
    resident = workers.residents.get("a")
    assert resident.gradients
    for name, gradient in resident.gradients.items():
        factor = factor_of(name)
        assert factor
        judge = theirs[f"base_model.model.{factor.hf_module}.{factor.side}.default.weight"].grad
        narrow = gradient[:8] if factor.side == "lora_A" else gradient[:, :8]
        assert (narrow - judge).norm() <= 1e-4 * judge.norm(), name
        assert gradient.count_nonzero() == narrow.count_nonzero()


def looked_at(model, out, settings):
    """What passes of every loss tell, and the norms of their gradients."""
    # An eps that no rounding shows beside.
    orders = [opening("a", 8), passing("a", data(4)), stepping("a", 0.05, eps=0.1)]
    for loss in PARAMS:
        orders += [passing("a", given_for(loss), loss=loss), stepping("a", 0.0)]
    [results] = each_done(model, out, [orders], settings)
    passes, steps = results[3::2], results[4::2]
    return [
        (
            each.metrics["loss:sum"],
            step.metrics["grad_norm"],
            [outputs["logprobs"].numpy().tolist() for outputs in each.outputs],
        )
        for each, step in zip(passes, steps, strict=True)
    ]


LAYOUTS = {
    "ulysses 2": {"ulysses_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring 2 sharded": {"ringattn_parallel_size": 2, "data_parallel_mode": "fsdp2"},
    "replicate 2": {"data_parallel_replicate_size": 2, "data_parallel_mode": "ddp"},
}


QUICK = ("pp 2",)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name in LAYOUTS],
)
def test_every_layout_finds_the_same(model, tmp_path, layout):
    alone = looked_at(model, tmp_path, {})
    for found in on_ranks(2, looked_at, model, tmp_path, LAYOUTS[layout]):
        for (loss, norm, log_probs), (its_loss, its_norm, its) in zip(found, alone, strict=True):
            assert loss == pytest.approx(its_loss, rel=1e-4)
            assert norm == pytest.approx(its_norm, rel=1e-4)
            for mine, theirs in zip(log_probs, its, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


def test_what_no_loss_is_computed_of_is_refused_with_the_sample_and_the_name(begun):
    workers, _ = begun
    [datum] = data(1)
    short = {**datum.inputs, "weights": Array.of([1.0], "float32")}
    strange = {**datum.inputs, "advantages": datum.inputs["weights"]}
    beyond = {**datum.inputs, "target_tokens": Array.of([999] * datum.tokens.shape[0], "int64")}
    faults = {
        "sample 0 has .* tokens, and weights of shape": (short, {}),
        "sample 0 has advantages": (strange, {}),
        "sample 0 has no logprobs": (datum.inputs, {"loss": "ppo"}),
        "has 999 in target_tokens": (beyond, {}),
        "takes no beta": (datum.inputs, {"params": {"beta": 1.0}}),
    }
    for words, (inputs, more) in faults.items():
        flawed = type(datum)(tokens=datum.tokens, inputs=inputs)
        with pytest.raises(RefusedError, match=words) as refused:
            workers.do(passing("a", (flawed,), **more))
        assert refused.value.code == "invalid"


def test_gradients_of_sums_and_of_means_are_not_added_up(begun):
    workers, _ = begun
    workers.residents.get("a").drop_gradients()
    workers.do(passing("a", data(2)))
    with pytest.raises(RefusedError, match="per sum"):
        workers.do(passing("a", data(2), per="token"))
