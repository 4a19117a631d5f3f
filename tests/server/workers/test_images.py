"""Samples and prompts with images: what the workers make of them is what transformers makes."""

from base64 import b64encode

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from penstock.server.api.wire.chunks import ChunkDecoder
from penstock.server.images.expand import load_expander
from penstock.server.protocol.requests import Sample
from penstock.server.protocol.types import Array, Datum, SamplingParams
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    ForwardBackwardCommand,
    GenerateCommand,
)
from tests.ranks import RankError, on_ranks
from tests.server.image_models import PICTURES, Judge, write_image_model
from tests.server.workers.orders import operations, stepping

pytestmark = [pytest.mark.slow, pytest.mark.dist]

ONE, TWO, THREE = PICTURES
SAMPLES = [
    [[9, 11, 40, 7]],
    [[9, 258], ONE, [259, 30, 31, 32]],
    [[258], THREE, [259, 258], TWO, [259, 20, 258], ONE, [259, 8, 12, 15, 17]],
    [[258], ONE, [259, 99]],
]
"""With no, one, three and one images; the last is that of the second."""


MODELS = ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory, request):
    return write_image_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def judge(folder):
    return Judge(folder)


@pytest.fixture(scope="module")
def expander(folder):
    return load_expander(str(folder))


def encoded(expander, samples):
    """Datums of samples, whose images have weight 0, and the images."""
    chunks = ChunkDecoder(expander)
    data = []
    rng = np.random.default_rng(5)
    for number, parts in enumerate(samples):
        model_input = chunks.from_json(
            [{"tokens": part} if isinstance(part, list) else json_image(part) for part in parts],
            f"sample {number}",
        )
        count = len(model_input.tokens)
        is_text = model_input.tokens != expander.processor.token_id
        inputs = {
            "target_tokens": Array.of(rng.integers(0, 255, count), "int64"),
            "weights": Array.of(is_text * rng.uniform(0.5, 1, count), "float32"),
        }
        tokens = Array.of(model_input.tokens, "int32")
        data.append(Datum(tokens=tokens, inputs=inputs, images=model_input.images))
    return tuple(data), tuple(chunks.images)


def json_image(content):
    return {"type": "image", "data": b64encode(content).decode(), "format": "png"}


def a_pass(expander, samples, rows, **more):
    data, images = encoded(expander, samples)
    return ForwardBackwardCommand(
        model="m", data=data, images=images, rows=rows, loss="cross_entropy", **more
    )


@pytest.mark.parametrize("rows", [((0, 1), (2, 3)), ((3, 2, 1, 0),)], ids=["two rows", "packed"])
def test_log_probs_are_those_of_transformers(folder, judge, expander, tmp_path, rows):
    workers = operations(folder, tmp_path)
    workers.do(CreateModelCommand(model="m", lora=None))
    order = a_pass(expander, SAMPLES, rows, forward_only=True)
    assert len(order.images) == 3
    found = workers.do(order).outputs
    for parts, datum, outputs in zip(SAMPLES, order.data, found, strict=True):
        targets = datum.inputs["target_tokens"].numpy()
        with torch.no_grad():
            wanted = judge.log_probs(parts, targets)
        assert np.allclose(outputs["logprobs"].numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_a_step_is_that_of_torch_and_what_is_saved_has_the_vision_tower(folder, expander, tmp_path):
    workers = operations(folder, tmp_path, lora={"enable_lora": False})
    workers.do(CreateModelCommand(model="m", lora=None))
    order = a_pass(expander, SAMPLES, ((0, 1), (2, 3)))
    workers.do(order)
    workers.do(stepping("m", 1e-2, eps=1e-4))
    workers.do(ExportCommand(model="m", folder=str(tmp_path / "kept"), dtype="float32"))
    judge = Judge(folder)
    before = {name: one.clone() for name, one in judge.model.state_dict().items()}
    judge.model.model.visual.requires_grad_(False)
    trained = [one for one in judge.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0)
    for parts, datum in zip(SAMPLES, order.data, strict=True):
        given = {name: array.numpy() for name, array in datum.inputs.items()}
        logp = judge.log_probs(parts, given["target_tokens"])
        (-logp * torch.as_tensor(given["weights"].copy())).sum().backward()
    optimizer.step()
    ours = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "kept").state_dict()
    wanted = judge.model.state_dict()
    assert ours.keys() == wanted.keys()
    sampled = workers.do(
        GenerateCommand(
            samples=(drawing(order.data[2], order.images, max_tokens=0, prompt_logprobs=True),),
            adapter=str(tmp_path / "kept"),
        )
    )
    with torch.no_grad():
        prompt = np.append(order.data[2].tokens.numpy()[1:], 0)
        scored = judge.log_probs(SAMPLES[2], prompt)[:-1].numpy()
    found = sampled.results[0].prompt_logprobs.numpy()[1:]
    assert np.allclose(found, scored, atol=1e-4)
    for name, tensor in wanted.items():
        error = (ours[name] - tensor).norm() / tensor.norm()
        # Adam amplifies rounding where gradients are nearly zero, as those of key biases are.
        assert error < 2e-5, (name, error)
        assert ("visual" in name) == torch.equal(tensor, before[name])


def drawing(datum, images, *, prompt_logprobs=False, **sampling):
    """A greedy completion of a sample's tokens and images."""
    return Sample(
        prompt=datum.tokens,
        images=tuple(images[index] for index in datum.images),
        sampling=SamplingParams(temperature=0.0, **sampling),
        prompt_logprobs=prompt_logprobs,
    )


def test_prompts_with_images_are_completed_as_by_transformers(folder, judge, expander, tmp_path):
    workers = operations(folder, tmp_path)
    data, images = encoded(expander, SAMPLES)
    count = 6
    samples = [
        drawing(datum, images, max_tokens=count, ignore_eos=True, prompt_logprobs=True)
        for datum in data
    ]
    samples[1] = replace(samples[1], count=2)
    order = GenerateCommand(samples=tuple(samples))
    for parts, datum, result in zip(SAMPLES, data, workers.do(order).results, strict=True):
        prompt = datum.tokens.numpy()
        given = [*parts]
        with torch.no_grad():
            scored = judge.log_probs(given, np.append(prompt[1:], 0))[:-1]
            wanted, log_probs = [], []
            for _ in range(count):
                logits = judge.model(**judge.inputs([*given, wanted]), use_cache=False).logits
                best, token = logits[0, -1].float().log_softmax(-1).max(-1)
                wanted.append(token.item())
                log_probs.append(best.item())
        assert np.allclose(result.prompt_logprobs.numpy()[1:], scored.numpy(), atol=1e-5)
        for sequence in result.sequences:
            assert sequence.tokens.numpy().tolist() == wanted
            assert np.allclose(sequence.logprobs.numpy(), log_probs, atol=1e-5)


def shared_between_ranks(folder, out, settings):
    """The log-probs of samples and the completions of prompts, before and after a step."""
    workers = operations(folder, out, **settings)
    order = a_pass(load_expander(str(folder)), SAMPLES, ((0,), (1,), (2,), (3,)))
    prompts = GenerateCommand(
        samples=tuple(drawing(datum, order.images, max_tokens=3) for datum in order.data),
        adapter=str(out / "kept"),
    )
    save = ExportCommand(model="m", folder=str(out / "kept"))
    orders = [CreateModelCommand(model="m", lora=None), order, stepping("m"), order, save, prompts]
    done = [workers.do(one) for one in orders]
    found = [outputs["logprobs"].numpy() for at in (1, 3) for outputs in done[at].outputs]
    found += [sequence.logprobs.numpy() for one in done[5].results for sequence in one.sequences]
    return np.concatenate(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"ringattn_parallel_size": 2},
    ],
    ids=["fsdp2", "tp", "pp", "ring"],
)
def test_any_layout_makes_the_same_of_images(folder, tmp_path, layout):
    if folder.name.startswith("qwen3_vl") and "pipeline_parallel_size" in layout:
        with pytest.raises(RankError, match="DeepStack"):
            on_ranks(2, shared_between_ranks, folder, tmp_path / "apart", layout)
        return
    [alone] = on_ranks(1, shared_between_ranks, folder, tmp_path / "alone", {})
    found = on_ranks(2, shared_between_ranks, folder, tmp_path / "apart", layout)
    for each in found:
        assert np.allclose(each, alone, rtol=1e-4, atol=1e-4)
