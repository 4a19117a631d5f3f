"""What cannot be done is refused before it waits its turn, and says which number is wrong."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.protocol.images import Image
from penstock.server.protocol.losses import OPTIONAL, REQUIRED
from penstock.server.protocol.requests import (
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    Sample,
    SaveState,
    SyncWeights,
)
from penstock.server.protocol.types import (
    AdamParams,
    Array,
    Datum,
    LoraConfig,
    Loss,
    SamplingParams,
)
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.validate_request import check, check_base, check_ttl
from tests.server.workers.standing_in import SERVED, VOCABULARY

NAN, INF = math.nan, math.inf


def datum(**changed):
    inputs = {
        "target_tokens": Array.of([1, 2, 3], "int64"),
        "logprobs": Array.of([-1, -2, -3], "float32"),
        "advantages": Array.of([1, 1, 1], "float32"),
    }
    tokens = changed.pop("tokens", Array.of([0, 1, 2], "int32"))
    inputs |= {name: array for name, array in changed.items() if array is not None}
    return Datum(tokens=tokens, inputs={k: v for k, v in inputs.items() if k not in _left(changed)})


def _left(changed):
    return [name for name, array in changed.items() if array is None]


def a_pass(loss: Loss = "ppo", params=None, **changed):
    return ForwardBackward(
        model="m", data=(datum(), datum(**changed)), loss=loss, params=params or {}
    )


def floats(*numbers):
    return Array.of(numbers, "float32")


WRONG = {
    "no samples": (ForwardBackward(model="m", data=(), loss="ppo"), "has no samples"),
    "no targets": (a_pass(target_tokens=None), "sample 1 has no target_tokens"),
    "no logprobs": (a_pass(logprobs=None), "sample 1 has no logprobs, which ppo takes"),
    "short": (a_pass(advantages=floats(1, 2)), r"advantages of sample 1 has shape \[2\]"),
    "square": (a_pass(advantages=Array.of([[1, 2, 3]], "float32")), r"has shape \[1, 3\]"),
    "unknown": (a_pass(advantage=floats(1, 2, 3)), "sample 1 has advantage, which ppo does not"),
    "not finite": (a_pass(logprobs=floats(0, NAN, 0)), "logprobs of sample 1 is nan at 1"),
    "infinite": (a_pass(weights=floats(0, 0, INF)), "weights of sample 1 is inf at 2"),
    "no tokens": (a_pass(tokens=Array.of([], "int32")), "T at least 1"),
    "fractions": (a_pass(tokens=floats(0, 1, 2)), "tokens are whole numbers"),
    "beyond": (a_pass(tokens=Array.of([0, 100, 1], "int32")), "100 at 1 is no token.*below 100"),
    "below": (a_pass(target_tokens=Array.of([1, 2, -100], "int64")), "-100 at 2 is no token"),
    "number": (a_pass(params={"beta": 1.0}), "ppo takes no beta; it takes clip_low_threshold"),
    "infinite number": (a_pass(params={"clip_low_threshold": INF}), "inf, which is not finite"),
    "rate": (OptimStep(model="m", adam=AdamParams(learning_rate=NAN)), "learning_rate is nan"),
    "negative": (OptimStep(model="m", adam=AdamParams(weight_decay=-1)), "weight_decay is -1"),
    "beta": (OptimStep(model="m", adam=AdamParams(beta2=1.0)), "beta2 is 1.0"),
    "rank": (
        CreateModel(session="s", model="m", base_model=None, lora=LoraConfig(rank=17)),
        "17; 1 to 16 may be",
    ),
    "no rank": (
        CreateModel(session="s", model="m", base_model=None, lora=LoraConfig(rank=0)),
        "0; 1 to 16 may be",
    ),
    "alpha": (
        CreateModel(session="s", model="m", base_model=None, lora=LoraConfig(rank=1, alpha=NAN)),
        "alpha is nan",
    ),
    "name": (SaveState(model="m", name="a/b"), "'a/b' is no name of a checkpoint"),
    "the first": (SaveState(model="m", name="000000", overwrite=True), "choose another name"),
    "time": (SaveState(model="m", ttl_seconds=0), "ttl_seconds is 0"),
    "path": (LoadState(model="m", path="m/000000"), "no path of a checkpoint"),
    "port": (SyncWeights(model="m", master_port=70000), "70000, which is no port"),
    "buffer": (SyncWeights(model="m", buffer_size_mb=0), "buffer_size_mb is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    work, said = WRONG[name]
    with pytest.raises(RequestError, match=said) as caught:
        check(work, SERVED)
    assert (caught.value.category, caught.value.code) == ("user", "invalid")


@pytest.mark.parametrize("loss", REQUIRED)
def test_all_that_a_loss_takes_is_let_in(loss):
    names = (*REQUIRED[loss], *OPTIONAL[loss])
    inputs = {name: floats(0.5, 0.5, 0.5) for name in names}
    inputs["target_tokens"] = Array.of([1, 2, 3], "int64")
    tokens = Array.of([0, 1, VOCABULARY - 1], "int32")
    check(
        ForwardBackward(model="m", data=(Datum(tokens=tokens, inputs=inputs),), loss=loss), SERVED
    )


def distilling(targets, weights):
    inputs = {
        "target_tokens": Array.of(targets, "int64"),
        "weights": Array.of(weights, "float32"),
    }
    one = Datum(tokens=Array.of([0, 1, 2], "int32"), inputs=inputs)
    return ForwardBackward(model="m", data=(one,), loss="cross_entropy")


def test_a_token_may_have_several_targets_where_the_loss_is_a_sum_of_theirs():
    targets, weights = [[1, 2], [3, 4], [5, 6]], [[1, 0], [0.5, 0.5], [0, 1]]
    check(distilling(targets, weights), SERVED)
    wrong = {
        r"weights of sample 0 has shape \[3\].*each target": distilling(targets, [1, 1, 1]),
        r"target_tokens of sample 0 has shape \[2, 2\]": distilling(targets[1:], weights[1:]),
        r"shape \[3, 2\], and its tokens 3: it has one number for each token": a_pass(
            "importance_sampling", target_tokens=Array.of(targets, "int64")
        ),
        "nan at 3": distilling(targets, [[1, 0], [0.5, NAN], [0, 1]]),
        "100 at 5 is no token": distilling([*targets[:2], [5, 100]], weights),
        "1025 targets of each token; 1024 may be": distilling(
            np.ones((3, 1025)), np.ones((3, 1025))
        ),
        r"shape \[3, 0\]": distilling(np.zeros((3, 0)), np.zeros((3, 0))),
    }
    for said, work in wrong.items():
        with pytest.raises(RequestError, match=said):
            check(work, SERVED)


IMAGE = Image(digest=b"d", tensors={}, num_tokens=2)
TAKES_IMAGES = msgspec.structs.replace(SERVED, image_token_id=1)


@pytest.mark.parametrize(
    ("served", "tokens", "images", "why"),
    [
        (TAKES_IMAGES, [0, 1, 1], (), "sample 0 has 2 image tokens (1) for 0 features of 0 images"),
        (TAKES_IMAGES, [0, 2, 1], (0,), "sample 0 has 1 image tokens (1) for 2 features"),
        (TAKES_IMAGES, [0, 1, 1], (1,), "sample 0 has images that are not among those"),
        (TAKES_IMAGES, [0, 1, 1], (-1,), "sample 0 has images that are not among those"),
        (SERVED, [0, 1, 1], (0,), "sample 0 has images, and a llama takes text alone"),
    ],
)
def test_images_and_their_tokens_belong_together(served, tokens, images, why):
    tokens = Array.of(tokens, "int32")
    sample = msgspec.structs.replace(datum(tokens=tokens), images=images)
    order = ForwardBackward(model="m", data=(sample,), loss="ppo", images=(IMAGE,))
    with pytest.raises(RequestError) as refused:
        check(order, served)
    assert (refused.value.code, why in str(refused.value)) == ("invalid", True)
    fine = msgspec.structs.replace(sample, tokens=Array.of([0, 1, 1], "int32"), images=(0,))
    check(msgspec.structs.replace(order, data=(fine,)), TAKES_IMAGES)


def test_a_prompt_has_an_image_token_for_each_feature():
    def prompt(*tokens):
        return Sample(prompt=Array.of(tokens, "int32"), sampling=SamplingParams(), images=(IMAGE,))

    check(prompt(0, 1, 1), TAKES_IMAGES)
    with pytest.raises(RequestError, match="the prompt has 1 image tokens"):
        check(prompt(0, 1, 2), TAKES_IMAGES)


def test_of_tokens_that_do_not_count_anything_may_be_said():
    check(a_pass(logprobs=floats(0, NAN, -INF), weights=floats(1, 0, 0)), SERVED)
    check(
        a_pass(logprobs=floats(0, NAN, -INF), mask=floats(1, 1, 0), weights=floats(1, 0, 5)), SERVED
    )
    with pytest.raises(RequestError, match="-inf at 2"):
        check(a_pass(logprobs=floats(0, NAN, -INF), weights=floats(1, 0, 1)), SERVED)


def sample(**changed):
    prompt = changed.pop("prompt", Array.of([1, 2], "int32"))
    known = {key: changed.pop(key) for key in list(changed) if key in Sample.__struct_fields__}
    return Sample(prompt=prompt, sampling=SamplingParams(**changed), **known)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (sample(prompt=Array.of([], "int32")), "T at least 1"),
        (sample(prompt=Array.of([VOCABULARY], "int32")), "100 at 0 is no token"),
        (sample(prompt=Array.of([1] * 65, "int32")), "65 tokens, and the model's context 64"),
        (sample(count=0), "0 sequences"),
        (sample(count=10**6), "1000000 sequences"),
        (sample(topk_prompt_logprobs=-1), "topk_prompt_logprobs is -1"),
        (sample(topk_sample_logprobs=1025), "topk_sample_logprobs is 1025"),
        (sample(count=1024, topk_sample_logprobs=100), "1024 completions of up to 62"),
        (sample(sampler="s:sample:1", path="m/sampler_weights/a"), "both a sampler and a path"),
        (sample(path="m"), "no path of a checkpoint"),
        (sample(temperature=NAN), "temperature is nan"),
        (sample(temperature=-0.1), "temperature is -0.1"),
        (sample(top_k=0), "top_k is 0"),
        (sample(top_p=0.0), "top_p is 0.0"),
        (sample(top_p=1.1), "top_p is 1.1"),
        (sample(max_tokens=-1), "max_tokens is -1"),
        (sample(stop_tokens=(1, -1)), "stop_tokens: -1 at 1"),
        (sample(stop_texts=("a", "")), "empty text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_drawn_is_refused(work, said):
    with pytest.raises(RequestError, match=said):
        check(work, SERVED)


def test_where_nothing_can_be_sampled_that_is_said():
    check(sample(), SERVED)
    with pytest.raises(RequestError, match="nothing can be sampled here"):
        check(sample(), msgspec.structs.replace(SERVED, samples=False))


def test_the_base_model_is_known_by_its_names():
    for name in (None, "tiny", "path/of/it"):
        check_base(name, ["tiny", "path/of/it"])
    with pytest.raises(RequestError, match="the base model is tiny here; 'large' is not served"):
        check_base("large", ["tiny", "path/of/it"])


@pytest.mark.parametrize("seconds", [0, -1, NAN, INF])
def test_nothing_is_kept_for_no_time_or_for_a_time_that_is_none(seconds):
    with pytest.raises(RequestError, match="ttl_seconds"):
        check_ttl(seconds)


ARRAYS = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "int64", "int32"]),
    shape=st.lists(st.integers(-2, 4), max_size=2).map(tuple),
    data=st.binary(max_size=40),
)


@given(tokens=ARRAYS, targets=ARRAYS, weights=ARRAYS)
@settings(max_examples=120, deadline=None)
def test_arrays_of_any_shape_and_bytes_are_let_in_or_refused(tokens, targets, weights):
    inputs = {"target_tokens": targets, "weights": weights}
    work = ForwardBackward(
        model="m", data=(Datum(tokens=tokens, inputs=inputs),), loss="cross_entropy"
    )
    try:
        check(work, SERVED)
    except RequestError:
        return
    assert len(tokens.shape) == 1
    assert targets.shape == weights.shape
    assert targets.shape[:1] == tokens.shape
    assert np.all(tokens.numpy() >= 0)
