"""The public SDK, unmodified, trains and samples with images on a real server; transformers and
peft judge the numbers."""

import gc
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
from tinker import types

from tests.media.pictures import png_header
from tests.server.image_models import PICTURES, Judge, write_image_model
from tests.server.serving import Server

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
]

START, END = 258, 259
"""<|vision_start|> and <|vision_end|>: the client's text."""
SAMPLES = [
    [[9, 11, 40, 7]],
    [[START], PICTURES[0], [END, 30, 31, 32]],
    [[START], PICTURES[1], [END, 4, START], PICTURES[2], [END, 12, START], PICTURES[0], [END, 3]],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_image_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("served"), model).start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def judge(model):
    return Judge(model)


@pytest.fixture
def service(server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found = tinker.ServiceClient(base_url=server.url, api_key="tml-of-tests")
    yield found
    found.holder.run_coroutine_threadsafe(found.holder.aclose()).result(10)
    gc.collect()


def model_input(judge, parts):
    return types.ModelInput(
        chunks=[
            types.ImageChunk(data=part, format="png", expected_tokens=judge.count(part))
            if isinstance(part, bytes)
            else types.EncodedTextChunk(tokens=part)
            for part in parts
        ]
    )


def datum(judge, parts):
    """Each token predicts the next; images have weight 0."""
    ids = judge.inputs(parts)["input_ids"][0].numpy()
    targets = np.append(ids[1:], 0)
    weights = (targets != judge.image_token).astype(np.float32)
    given = model_input(judge, parts)
    assert given.length == len(ids)
    inputs: Any = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=given, loss_fn_inputs=inputs)


def scored(judge, parts):
    """The log-probs of the targets of a datum by transformers."""
    ids = judge.inputs(parts)["input_ids"][0].numpy()
    with torch.no_grad():
        return judge.log_probs(parts, np.append(ids[1:], 0)).numpy()


def test_training_and_sampling_with_images_are_those_of_transformers(service, server, model, judge):
    client = service.create_lora_training_client(str(model), rank=8, seed=3).result()
    data = [datum(judge, parts) for parts in SAMPLES]
    losses = []
    for step in range(4):
        passed = client.forward_backward(data, "cross_entropy").result()
        losses.append(passed.metrics["loss:sum"])
        if not step:
            for parts, output in zip(SAMPLES, passed.loss_fn_outputs, strict=True):
                found = output["logprobs"].to_numpy()
                np.testing.assert_allclose(found, scored(judge, parts), rtol=1e-5, atol=1e-5)
        client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    assert losses[-1] < losses[0]
    saved = client.save_weights_for_sampler("kept").result().path
    run, kind, name = saved.removeprefix("tinker://").split("/")
    adapted = Judge(model)
    folder = server.folder / "out" / kind / run / name
    adapted.model = peft.PeftModel.from_pretrained(adapted.model, folder).eval()
    forward = client.forward(data, "cross_entropy").result()
    for parts, output in zip(SAMPLES, forward.loss_fn_outputs, strict=True):
        found = output["logprobs"].to_numpy()
        np.testing.assert_allclose(found, scored(adapted, parts), rtol=1e-4, atol=1e-5)
    sampling = service.create_sampling_client(model_path=saved)
    parts = SAMPLES[2]
    how = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    [sequence] = sampling.sample(model_input(judge, parts), 1, how).result().sequences
    wanted: list[int] = []
    with torch.no_grad():
        for _ in range(5):
            logits = adapted.model(**adapted.inputs([*parts, wanted]), use_cache=False).logits
            wanted.append(int(logits[0, -1].argmax()))
    assert sequence.tokens == wanted
    log_probs = sampling.compute_logprobs(model_input(judge, parts)).result()
    np.testing.assert_allclose(log_probs[1:], scored(adapted, parts)[:-1], rtol=1e-4, atol=1e-5)


def test_images_that_cannot_be_used_are_refused(service, model):
    client = service.create_lora_training_client(str(model), rank=8).result()
    sampling = service.create_sampling_client(base_model=str(model))
    for content, expected, why in (
        (png_header(20_000, 20_000), 4, "it has too many pixels"),
        (PICTURES[0], 400, "expected_tokens is 400"),
    ):
        chunk = types.ImageChunk(data=content, format="png", expected_tokens=expected)
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), chunk])
        inputs: Any = {"target_tokens": np.zeros(prompt.length, np.int64)}
        sample = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
        with pytest.raises(tinker.BadRequestError, match=f"chunk 1 of .*sample 0 .*{why}"):
            client.forward_backward([sample], "cross_entropy").result(60)
        with pytest.raises(tinker.BadRequestError, match=f"chunk 1 of the prompt .*{why}"):
            sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(60)
