"""The public SDK, unmodified, trains and samples on a real server; others judge the numbers."""

import gc
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from tinker import types

from tests.server.serving import Server, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
]

CLOSE = 1e-5
"""Sums of fp32 numbers in another order."""

RATE, STEPS = 2e-3, 6

KEY = "tml-of-tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("served"), model).start()
    yield found
    found.stop()


CLIENTS: list[tinker.ServiceClient] = []


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    # The SDK leaves its connections to the collector, which may find them within another test.
    while CLIENTS:
        holder = CLIENTS.pop().holder
        holder.run_coroutine_threadsafe(holder.aclose()).result(10)
    gc.collect()


def service_of(server: Server):
    CLIENTS.append(tinker.ServiceClient(base_url=server.url, api_key=KEY))
    return CLIENTS[-1]


def rows(shared, count: int = 12) -> list[tuple[list[int], int]]:
    """Tokens of questions with their answers, and how many of them are the question's."""
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:count]
    found = []
    for line in map(json.loads, lines):
        question, answer = line["question"].encode()[:120], line["answer"].encode()[:80]
        found.append(([*question, 10, *answer], len(question) + 1))
    return found


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Every token but the last, with the ones after them as targets."""
    told: dict[str, Any] = {"target_tokens": list(tokens[1:]), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=told
    )


def datums(rows):
    return [
        datum(tokens, weights=[float(at >= first) for at in range(1, len(tokens))])
        for tokens, first in rows
    ]


def train(client, rows, steps: range) -> list[float]:
    """The loss of each step over four of the rows."""
    losses = []
    for step in steps:
        some = [rows[(4 * step + at) % len(rows)] for at in range(4)]
        passed = client.forward_backward(datums(some), "cross_entropy")
        stepped = client.optim_step(
            types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8)
        )
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def judged(model, adapter, rows, steps: int) -> list[float]:
    """What transformers, peft and torch make of the same loop, from the same adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    lora.train()
    trained = [each for each in lora.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for tokens, first in [rows[(4 * step + at) % len(rows)] for at in range(4)]:
            ids = torch.tensor([tokens])
            logits = lora(input_ids=ids[:, :-1]).logits[0].float()
            each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            total = total + each[first - 1 :].sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def folder_of(server: Server, path: str):
    """Where the server keeps what a path names."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return server.folder / "out" / kind / run / name


def test_several_targets_of_a_token_are_each_as_it_would_be_alone(server, model):
    client = service_of(server).create_lora_training_client(str(model), rank=8, seed=3).result()
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 256, 12).tolist(), rng.integers(0, 256, (12, 3))
    weights = rng.random((12, 3)).astype(np.float32)

    def told(targets, weights):
        sample = types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, "weights": weights},
        )
        passed = client.forward_backward([sample], "cross_entropy").result()
        return passed.loss_fn_outputs[0]["logprobs"].to_numpy(), passed.metrics["loss:sum"]

    log_probs, loss = told(targets, weights)
    assert log_probs.shape == (12, 3)
    assert loss == pytest.approx(-(weights * log_probs).sum(), rel=CLOSE)
    alone = [told(targets[:, at], weights[:, at])[0] for at in range(3)]
    np.testing.assert_allclose(log_probs, np.stack(alone, 1), rtol=CLOSE, atol=CLOSE)
    metrics = client.optim_step(types.AdamParams(learning_rate=RATE)).result().metrics
    assert metrics
    assert metrics["grad_norm"] > 0


def test_supervised_training_is_that_of_peft_and_torch(server, model, shared):
    client = service_of(server).create_lora_training_client(str(model), rank=8, seed=3).result()
    start = client.save_weights_for_sampler("start").result()
    found = train(client, rows(shared), range(STEPS))
    expected = judged(model, folder_of(server, start.path), rows(shared), STEPS)
    assert found == pytest.approx(expected, rel=CLOSE)
    assert found[-1] < found[0]


@pytest.mark.exhaustive
def test_a_server_that_was_killed_goes_on_from_what_was_saved_as_if_nothing_had_been(
    model, shared, tmp_path
):
    server = Server(tmp_path / "killed", model).start()
    try:
        first = service_of(server)
        client = first.create_lora_training_client(str(model), rank=4, seed=5).result()
        expected = train(client, rows(shared), range(3))
        saved = client.save_state("three").result().path
        expected += train(client, rows(shared), range(3, STEPS))
        server.kill()
        server.start()
        again = service_of(server).create_training_client_from_state_with_optimizer(saved).result()
        assert train(again, rows(shared), range(3, STEPS)) == pytest.approx(expected[3:], rel=1e-6)
    finally:
        server.stop()


KINDS: dict[str, dict[str, Any]] = {
    "linear attention": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "pad_token_id": None,
    },
    "mamba": {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "pad_token_id": None,
    },
    "latent attention": {
        "model_type": "youtu",
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_of_any_kind_of_layers_learns_what_is_rewarded(kind, tmp_path):
    model = write_model(tmp_path / "model", **KINDS[kind])
    server = Server(tmp_path / "served", model).start()
    try:
        assert_policy_learns(server, model)
    finally:
        server.stop()


def test_a_policy_learns_from_its_own_samples_what_is_rewarded(server, model):
    assert_policy_learns(server, model)


def assert_policy_learns(server, model):
    """Even tokens are rewarded, and there are more of them in the last turns."""
    client = service_of(server).create_lora_training_client(str(model), rank=16, seed=1).result()
    prompt = types.ModelInput.from_ints(list(b"say: "))

    means = []
    for turn in range(8):
        sampler = client.save_weights_and_get_sampling_client(f"turn-{turn}")
        # All of one length: nothing stops them, not even the end of a text.
        how = types.SamplingParams(max_tokens=8, temperature=1.0, seed=turn, stop=[])
        drawn = sampler.sample(prompt=prompt, num_samples=16, sampling_params=how).result()
        rewards = [[float(token % 2 == 0) for token in each.tokens] for each in drawn.sequences]
        means.append(float(np.mean(rewards)))
        data = []
        for each, its in zip(drawn.sequences, rewards, strict=True):
            tokens = [*prompt.to_ints(), *each.tokens]
            before = len(prompt.to_ints()) - 1
            data.append(
                datum(
                    tokens,
                    logprobs=[0.0] * before + list(each.logprobs or ()),
                    advantages=[0.0] * before + [one - means[-1] for one in its],
                )
            )
        passed = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        assert np.isfinite(passed.result().metrics["loss:sum"])
    assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.1


def test_logprobs_of_samples_are_those_of_the_model_that_is_trained(server, model):
    client = service_of(server).create_lora_training_client(str(model), rank=4, seed=2).result()
    sampler = client.save_weights_and_get_sampling_client("now")
    prompt = list(b"abc")
    drawn = sampler.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=6, seed=0),
    ).result()
    [sequence] = drawn.sequences
    tokens = [*prompt, *sequence.tokens]
    whole = datum(tokens, weights=[1.0] * (len(tokens) - 1))
    told = client.forward([whole], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    of_drawn = np.asarray(told.to_numpy())[len(prompt) - 1 :]
    np.testing.assert_allclose(np.asarray(sequence.logprobs), of_drawn, atol=2e-5)
    computed = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(np.asarray(computed[len(prompt) :], float), of_drawn, atol=2e-5)


@pytest.mark.exhaustive
def test_custom_losses_of_the_sdk_are_differentiated_through(server, model):
    client = service_of(server).create_lora_training_client(str(model), rank=4, seed=2).result()
    tokens = list(b"the same words")
    whole = datum(tokens, weights=[1.0] * (len(tokens) - 1))

    def squares(_, logprobs):
        return sum((each**2).sum() for each in logprobs), {"told": 1.0}

    first = client.forward_backward_custom([whole], squares).result()
    client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    second = client.forward_backward_custom([whole], squares).result()
    assert first.metrics["told"] == 1.0
    before, after = (
        np.square(np.asarray(each.loss_fn_outputs[0]["logprobs"].to_numpy())).sum()
        for each in (first, second)
    )
    assert after < before
