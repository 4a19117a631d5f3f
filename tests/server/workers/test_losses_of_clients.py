"""Losses of clients through a whole model, judged by autograd on the logits of transformers."""

import numpy as np
import peft
import pytest
import torch
import transformers

from penstock.adapters.names import parse_lora_name
from penstock.losses.policy import LossInputs, sequence_losses, token_losses
from penstock.server.protocol.losses import PARAMS
from penstock.server.protocol.types import Array
from penstock.server.protocol.worker_commands import ExportCommand
from penstock.server.worker.errors import CommandError
from tests.engine.runs import VOCAB
from tests.ranks import on_ranks
from tests.server.workers.orders import (
    data,
    each_done,
    opening,
    operations,
    passing,
    stepping,
)
from tests.turns import over_days

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

NUMBERS = {"ppo": {"eps_clip_c": 3.0}, "drgrpo": {"kl_beta": 0.2}, "dro": {"beta": 0.3}}


@pytest.fixture(scope="module")
def begun(model, tmp_path_factory):
    """Workers with a model that has learnt something, and the same in PEFT's hands."""
    out = tmp_path_factory.mktemp("begun")
    workers = operations(model, out)
    for order in (opening("a", 8), passing("a", data(4)), stepping("a", 0.05)):
        workers.do(order)
    workers.do(ExportCommand(model="a", folder=str(out / "sampler"), dtype="float32"))
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
        told = LossInputs(
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
    workers.models.get("a").zero_grad()
    passed = workers.do(passing("a", given, loss=loss, params=params))
    log_probs, total = judged(tuned, given, loss, params)
    assert passed.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    for outputs, theirs in zip(passed.outputs, log_probs, strict=True):
        mine = torch.tensor(outputs["logprobs"].numpy())
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)
    require_gradients_of(tuned, workers.models.get("a"))


def require_gradients_of(tuned, resident):
    """An adapter of rank 8 gathered PEFT's."""
    theirs = dict(tuned.named_parameters())
    assert resident.gradients
    for name, gradient in resident.gradients.items():
        factor = parse_lora_name(name)
        assert factor
        judge = theirs[f"base_model.model.{factor.hf_module}.{factor.side}.default.weight"].grad
        narrow = gradient[:8] if factor.side == "lora_A" else gradient[:, :8]
        assert (narrow - judge).norm() <= 1e-4 * judge.norm(), name
        assert gradient.count_nonzero() == narrow.count_nonzero()


def distilling(count, targets, seed=5):
    """Samples with this many targets of each token, as of a teacher's likeliest."""
    rng = np.random.default_rng(seed)
    made = []
    for datum in data(count, seed=seed):
        shape = (datum.tokens.shape[0], targets)
        inputs = {
            "target_tokens": Array.of(rng.integers(0, VOCAB, shape), "int64"),
            "weights": Array.of(rng.random(shape) * rng.integers(0, 2, shape), "float32"),
        }
        made.append(type(datum)(tokens=datum.tokens, inputs=inputs))
    return tuple(made)


def test_several_targets_are_learnt_as_autograd_learns_them_of_fp64_logits(begun):
    workers, tuned = begun
    # Samples of one target, of four and of two share a pass, and rows.
    given = (*distilling(2, 4), *data(1, seed=4), *distilling(1, 2, seed=6), *distilling(1, 1))
    workers.models.get("a").zero_grad()
    passed = workers.do(passing("a", given))
    tuned.zero_grad()
    total = 0.0
    for datum, outputs in zip(given, passed.outputs, strict=True):
        ids = torch.tensor(datum.tokens.numpy().astype("int64"))[None]
        targets, weights = (torch.tensor(each.numpy()) for each in datum.inputs.values())
        log_probs = tuned(ids).logits[0].double().log_softmax(-1)
        log_probs = log_probs.gather(1, targets.view(len(targets), -1)).view(targets.shape)
        loss = -(weights * log_probs).sum()
        loss.backward()
        total += loss.item()
        assert outputs["logprobs"].shape == targets.shape == outputs["elementwise_loss"].shape
        mine = torch.tensor(outputs["logprobs"].numpy())
        torch.testing.assert_close(mine.double(), log_probs.detach(), atol=2e-5, rtol=1e-5)
    assert passed.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    trained = sum(
        (datum.inputs["weights"].numpy().reshape(datum.tokens.shape[0], -1) != 0).any(1).sum()
        for datum in given
    )
    assert passed.metrics["valid_tokens:sum"] == trained
    require_gradients_of(tuned, workers.models.get("a"))


def test_one_target_of_several_is_as_the_only_one(begun):
    workers, _ = begun
    given = data(4, seed=8)
    wide = tuple(
        type(datum)(
            tokens=datum.tokens,
            inputs={
                name: Array.of(array.numpy()[:, None], array.dtype)
                for name, array in datum.inputs.items()
            },
        )
        for datum in given
    )
    found = []
    for each in (given, wide):
        workers.models.get("a").zero_grad()
        passed = workers.do(passing("a", each))
        found.append((passed, dict(workers.models.get("a").gradients)))
    (plain, gradients), (passed, its) = found
    assert passed.metrics["loss:sum"] == plain.metrics["loss:sum"]
    assert all(torch.equal(its[name], gradient) for name, gradient in gradients.items())
    for one, other in zip(passed.outputs, plain.outputs, strict=True):
        assert one["logprobs"].numpy()[:, 0].tolist() == other["logprobs"].numpy().tolist()


SEVERAL = {
    "tp 2": {"tensor_parallel_size": 2},
    "fsdp 2": {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2},
}


def distilled(model, out, layouts):
    """Under each layout: what a pass of several targets tells, and the norm of its gradients."""
    script = [opening("a", 8), passing("a", data(4)), stepping("a", 0.05, eps=0.1)]
    script += [passing("a", (*distilling(3, 4), *data(2, seed=4))), stepping("a", 0.0)]
    found = []
    for settings in layouts:
        [results] = each_done(model, out, [script], settings)
        passed, stepped = results[-2:]
        log_probs = [each["logprobs"].numpy() for each in passed.outputs]
        found.append((passed.metrics["loss:sum"], stepped.metrics["grad_norm"], log_probs))
    return found


def test_several_targets_are_the_same_over_ranks_that_share_the_vocabulary_or_the_weights(
    model, tmp_path
):
    [(loss, norm, log_probs)] = distilled(model, tmp_path, [{}])
    for found in on_ranks(2, distilled, model, tmp_path, list(SEVERAL.values())):
        for its_loss, its_norm, its in found:
            assert its_loss == pytest.approx(loss, rel=1e-5)
            assert its_norm == pytest.approx(norm, rel=1e-4)
            for mine, theirs in zip(its, log_probs, strict=True):
                assert mine.shape == theirs.shape
                np.testing.assert_allclose(mine, theirs, atol=1e-4)


def looked_at(model, out, settings):
    """What passes of every loss tell, and the norms of their gradients."""
    # An eps that no rounding shows beside.
    orders = [opening("a", 8), passing("a", data(4)), stepping("a", 0.05, eps=0.1)]
    for loss in PARAMS:
        orders += [passing("a", given_for(loss), loss=loss), stepping("a", 0.0)]
    orders += [passing("a", (*distilling(3, 4), *data(2, seed=4))), stepping("a", 0.0)]
    [results] = each_done(model, out, [orders], settings)
    passes, steps = results[3::2], results[4::2]
    return [
        (
            each.metrics["loss:sum"],
            step.metrics["grad_norm"],
            [outputs["logprobs"].numpy().ravel().tolist() for outputs in each.outputs],
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


@pytest.mark.parametrize("layout", over_days(LAYOUTS, 5))
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
    [several] = (one.inputs | {"logprobs": one.inputs["weights"]} for one in distilling(1, 2))
    several["advantages"] = several["weights"]
    beyond = {**datum.inputs, "target_tokens": Array.of([999] * datum.tokens.shape[0], "int64")}
    faults = {
        "sample 0 has target_tokens of shape .*, and weights of shape": (short, {}),
        "sample 0 has advantages": (strange, {}),
        "sample 0 has no logprobs": (datum.inputs, {"loss": "ppo"}),
        "has 999 in target_tokens": (beyond, {}),
        "takes no beta": (datum.inputs, {"params": {"beta": 1.0}}),
        "eps_clip_c is 0.5": ({}, {"loss": "ppo", "params": {"eps_clip_c": 0.5}}),
        "clip_low_threshold is 2, and clip_high_threshold 1.2": (
            {},
            {"loss": "cispo", "params": {"clip_low_threshold": 2.0}},
        ),
        "tokens, and target_tokens of shape": (several, {"loss": "dro"}),
    }
    for words, (inputs, more) in faults.items():
        flawed = type(datum)(tokens=datum.tokens, inputs=inputs)
        with pytest.raises(CommandError, match=words) as refused:
            workers.do(passing("a", (flawed,), **more))
        assert refused.value.code == "invalid"


def test_gradients_of_sums_and_of_means_are_not_added_up(begun):
    workers, _ = begun
    workers.models.get("a").zero_grad()
    workers.do(passing("a", data(2)))
    with pytest.raises(CommandError, match="per sum"):
        workers.do(passing("a", data(2), loss_reduction="token"))
