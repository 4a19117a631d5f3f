"""The public SDK of Tinker makes its calls, and gets what it asks for."""

import asyncio
import gc
import warnings

import numpy as np
import pytest

from penstock.server.api.wire import tinker_pb2
from penstock.server.protocol import requests, results
from tests.server.api.engine_of_a_table import MODEL, failure, listening

tinker = pytest.importorskip("tinker")
types = tinker.types

pytestmark = [
    # The SDK tells of its own calls that it will do without one day.
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
    # It leaves connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def service():
    with pytest.MonkeyPatch.context() as patch, listening(poll_seconds=0.25) as (url, engine):
        patch.setenv("TINKER_TELEMETRY", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = tinker.ServiceClient(
                base_url=url,
                api_key="tml-local",
                user_metadata={"why": "a test"},
                display_name="mine",
            )
        yield client, engine
        client.close("success").result(10)
    gc.collect()


@pytest.fixture(scope="module")
def training(service):
    client, _ = service
    return client.create_lora_training_client(base_model="tiny/byte-llama", rank=8).result(20)


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": [token + 1 for token in tokens],
            "weights": [1.0] * (len(tokens) - 1) + [0.0],
        },
    )


def test_the_service_tells_what_it_trains(service):
    told = service[0].create_rest_client().get_server_capabilities().result(20)
    (model,) = told.supported_models
    assert (model.model_name, model.max_context_length) == ("tiny/byte-llama", 2048)


def test_a_session_is_told_with_what_its_client_said_of_it(service, training):
    client, engine = service
    assert training.model_id == MODEL
    (begun,) = engine.works(requests.CreateSession)
    said = {"why": "a test", "session.display_name": "mine"}
    told = results.SessionResult(session="s", models=(), samplers=(), user_metadata=said)
    before = engine.table[requests.GetSession]
    engine.table[requests.GetSession] = lambda _: told
    try:
        answer = client.create_rest_client().get_session("s").result(20)
    finally:
        engine.table[requests.GetSession] = before
    assert (answer.user_metadata, answer.display_name) == ({"why": "a test"}, "mine")
    assert begun.user_metadata == {"why": "a test"} | {"session.display_name": "mine"}


def test_a_model_is_made_as_it_was_asked_for(service, training):
    (work,) = [work for work in service[1].works(requests.CreateModel) if work.path is None]
    assert (work.model, work.session, work.lora.rank) == (MODEL, "sess-1", 8)
    info = training.get_info()
    assert (info.model_id, info.lora_rank) == (MODEL, 8)
    assert info.model_data.tokenizer_id == "builtin"


def test_a_pass_brings_the_log_probabilities_of_each_sample_in_order(service, training):
    samples = [datum([5, 6, 7]), datum([8, 9])]
    result = training.forward_backward(samples, "cross_entropy").result(20)
    got = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    np.testing.assert_allclose(got[0], [-1.005, -1.006, -1.007], rtol=1e-6)
    np.testing.assert_allclose(got[1], [-2.008, -2.009], rtol=1e-6)
    work = service[1].works(requests.ForwardBackward)[-1]
    assert (work.loss_reduction, work.forward_only, work.loss) == ("sum", False, "cross_entropy")
    np.testing.assert_array_equal(work.data[0].inputs["target_tokens"].numpy(), [6, 7, 8])
    np.testing.assert_array_equal(work.data[0].inputs["weights"].numpy(), [1, 1, 0])


def test_several_targets_of_a_token_bring_as_many_log_probabilities(service, training):
    def several(tokens, count):
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": np.arange(len(tokens) * count).reshape(len(tokens), count),
                "weights": np.full((len(tokens), count), 1 / count, np.float32),
            },
        )

    # Also where samples have another number of them each.
    samples = [several([5, 6, 7], 2), several([8, 9], 2), datum([1, 2]), several([3], 4)]
    result = training.forward_backward(samples, "cross_entropy").result(20)
    got = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    assert [array.shape for array in got] == [(3, 2), (2, 2), (2,), (1, 4)]
    np.testing.assert_allclose(got[1], [[-2.008] * 2, [-2.009] * 2], rtol=1e-6)
    inputs = service[1].works(requests.ForwardBackward)[-1].data[0].inputs
    np.testing.assert_array_equal(inputs["target_tokens"].numpy(), [[0, 1], [2, 3], [4, 5]])


def test_targets_that_are_mostly_none_travel_sparse(service, training):
    torch = pytest.importorskip("torch")
    targets, weights = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8)
    targets[2, 3], weights[2, 3] = 7, 0.5
    sample = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert sample.loss_fn_inputs["weights"].sparse_crow_indices is not None
    training.forward_backward([sample], "cross_entropy").result(20)
    inputs = service[1].works(requests.ForwardBackward)[-1].data[0].inputs
    np.testing.assert_array_equal(inputs["target_tokens"].numpy(), targets.numpy())
    np.testing.assert_array_equal(inputs["weights"].numpy(), weights.numpy())


def test_a_pass_without_gradients_says_so(service, training):
    training.forward([datum([1, 2])], "cross_entropy").result(20)
    assert service[1].works(requests.ForwardBackward)[-1].forward_only


@pytest.mark.slow
def test_many_samples_travel_in_chunks_and_come_back_as_one(training):
    samples = [datum([index % 200, 3]) for index in range(1100)]
    result = training.forward_backward(samples, "cross_entropy").result(30)
    assert len(result.loss_fn_outputs) == 1100


def test_policy_losses_bring_their_numbers(service, training):
    sample = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": [2, 3],
            "logprobs": [-0.5, -0.25],
            "advantages": [1.0, -1.0],
        },
    )
    training.forward_backward([sample], "ppo", {"clip_high_threshold": 1.3}).result(20)
    work = service[1].works(requests.ForwardBackward)[-1]
    assert (work.loss, work.params) == ("ppo", {"clip_high_threshold": 1.3})
    np.testing.assert_array_equal(work.data[0].inputs["advantages"].numpy(), [1, -1])


def test_a_loss_of_the_clients_own_is_its_gradient_as_weights(service, training):
    def three_times(_, logprobs):
        return 3 * sum(one.sum() for one in logprobs), {"mine": 1.0}

    result = training.forward_backward_custom([datum([1, 2])], three_times).result(20)
    assert result.metrics["mine"] == 1.0
    work = service[1].works(requests.ForwardBackward)[-1]
    np.testing.assert_array_equal(work.data[0].inputs["weights"].numpy(), [-3, -3])


def test_works_of_a_model_are_numbered_without_a_gap(service, training):
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result(20)
    numbers = [ask.seq for ask in service[1].asks if getattr(ask.operation, "model", "") == MODEL]
    counted = [number for number in numbers if number is not None]
    assert sorted(counted) == list(range(1, len(counted) + 1))


def test_a_step_brings_its_numbers_and_tells_its_metrics(service, training):
    params = types.AdamParams(learning_rate=2e-4, beta2=0.99, grad_clip_norm=1.0)
    metrics = training.optim_step(params).result(20).metrics
    # `step` is what their loggers call their own.
    assert metrics == {"grad_norm": 1.5, "learning_rate": 2e-4, "optimizer_step": 1.0}
    adam = service[1].works(requests.OptimStep)[-1].adam
    assert (adam.beta2, adam.grad_clip_norm, adam.eps) == (0.99, 1.0, 1e-12)


def test_what_is_saved_is_loaded_by_its_path(service, training):
    saved = training.save_state("ck1", user_metadata={"of": "a test"}).result(20)
    assert saved.path == f"tinker://{MODEL}/weights/ck1"
    assert service[1].works(requests.SaveState)[-1].user_metadata == {"of": "a test"}
    training.load_state(saved.path).result(20)
    training.load_state_with_optimizer(saved.path).result(20)
    first, second = service[1].works(requests.LoadState)[-2:]
    assert (first.path, first.optimizer) == (f"{MODEL}/weights/ck1", False)
    assert second.optimizer


def test_a_model_begins_at_a_checkpoint(service):
    client, engine = service
    path = f"tinker://{MODEL}/weights/ck1"
    training = client.create_training_client_from_state_with_optimizer(path).result(20)
    work = engine.works(requests.CreateModel)[-1]
    assert (work.path, work.optimizer, work.lora) == (f"{MODEL}/weights/ck1", True, None)
    assert training.get_info().model_id == work.model != MODEL


def test_samples_are_drawn_from_what_was_saved(service, training):
    client, engine = service
    saved = training.save_weights_for_sampler("s1").result(20)
    assert saved.path == f"tinker://{MODEL}/sampler_weights/s1"
    sampler = client.create_sampling_client(model_path=saved.path).result(20)
    answer = sampler.sample(
        prompt=types.ModelInput.from_ints([1, 2]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=5, temperature=0.5, stop=["\n"]),
    ).result(20)
    assert [list(one.tokens) for one in answer.sequences] == [[0, 1, 2, 3, 4]] * 2
    assert len({one.sequence_id for one in answer.sequences}) == 2
    work = engine.works(requests.Sample)[-1]
    assert (work.sampling.stop_texts, work.sampling.temperature) == (("\n",), 0.5)
    assert engine.works(requests.CreateSampler)[-1].path == f"{MODEL}/sampler_weights/s1"


def test_a_prompt_is_scored_and_its_first_token_is_not(service):
    sampler = service[0].create_sampling_client(base_model="tiny/byte-llama").result(20)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(20)
    assert scored == [None, -0.25, -0.5]


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ignores"),
    [
        (None, (), (), False),
        ([], (), (), True),
        ("\n", ("\n",), (), False),
        ([5, 6], (), (5, 6), False),
    ],
)
def test_no_list_of_stops_leaves_the_end_of_a_text_and_an_empty_one_does_not(
    service, stop, texts, tokens, ignores
):
    client, engine = service
    sampler = client.create_sampling_client(base_model="tiny/byte-llama").result(20)
    params = types.SamplingParams(max_tokens=2, stop=stop)
    sampler.sample(types.ModelInput.from_ints([1]), 1, params).result(20)
    said = engine.works(requests.Sample)[-1].sampling
    assert (said.stop_texts, said.stop_tokens, said.ignore_eos) == (texts, tokens, ignores)


def test_the_likeliest_tokens_are_told_wherever_something_foretells_them(service):
    sampler = service[0].create_sampling_client(base_model="tiny/byte-llama").result(20)
    asked = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=2)}
    prompt = types.ModelInput.from_ints([1, 2, 3])
    answer = sampler.sample(
        prompt,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        **asked,
    ).result(20)
    both = [(0, -1.0), (1, -2.0)]
    assert answer.topk_prompt_logprobs == [None, both, both]
    assert answer.sequences[0].topk_logprobs == [[(0, -1.0)]] * 2
    last = sampler.sample(
        prompt,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=1,
        **asked,
    ).result(20)
    assert last.topk_prompt_logprobs == [None, None, both]
    assert last.prompt_logprobs == [None, None, -0.5]


def test_the_weights_of_now_are_sampled_from_without_a_name(service, training):
    sampler = training.save_weights_and_get_sampling_client().result(20)
    work = service[1].works(requests.SaveSamplerWeights)[-1]
    assert (work.session, work.keep, work.name) == ("sess-1", False, None)
    answer = sampler.sample(
        prompt=types.ModelInput.from_ints([1]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
    ).result(20)
    assert len(answer.sequences) == 1
    assert service[1].works(requests.Sample)[-1].sampler == f"sess-1:sample:{work.number}"


def test_what_is_kept_is_listed_and_let_go(service):
    client, engine = service
    rest = client.create_rest_client()
    assert rest.list_training_runs().result(20).training_runs[0].training_run_id == MODEL
    assert rest.get_training_run(MODEL).result(20).lora_rank == 8
    assert rest.list_training_runs(access_scope="accessible").result(20).cursor.total_count == 1
    first, second = rest.list_checkpoints(MODEL).result(20).checkpoints
    assert (first.checkpoint_id, second.checkpoint_type) == ("weights/ck1", "sampler")
    assert first.user_metadata == {"of": "a test"}
    assert len(rest.list_user_checkpoints().result(20).checkpoints) == 2
    path = first.tinker_path
    info = rest.get_weights_info_by_tinker_path(path).result(20)
    assert (info.lora_rank, info.train_mlp, info.train_attn) == (8, False, None)
    rest.publish_checkpoint_from_tinker_path(path).result(20)
    rest.unpublish_checkpoint_from_tinker_path(path).result(20)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(20)
    rest.delete_checkpoint(MODEL, "weights/ck1").result(20)
    kept = [(work.public, work.ttl_seconds) for work in engine.works(requests.UpdateCheckpoint)]
    assert kept == [(True, None), (False, None), (None, 7200)]
    assert engine.works(requests.DeleteCheckpoint)[-1].name == "weights/ck1"
    assert rest.get_session("sess-1").result(20).training_run_ids == [MODEL]
    assert rest.list_sessions().result(20).sessions == ["sess-1"]
    assert rest.get_sampler("sess-1:sample:0").result(20).model_path.endswith("sampler_weights/s1")


def test_a_failure_reaches_the_caller_with_its_words_and_category(service, training):
    _, engine = service
    before = engine.table[requests.SaveState]
    engine.table[requests.SaveState] = lambda _: failure("weights/ck1 is there already", "exists")
    try:
        with pytest.raises(tinker.RequestFailedError, match="is there already") as caught:
            training.save_state("ck1").result(20)
    finally:
        engine.table[requests.SaveState] = before
    assert caught.value.category == types.RequestErrorCategory.User


def test_what_is_refused_at_once_does_not_hold_up_what_follows(service, training):
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2]}
    )
    with pytest.raises(tinker.BadRequestError, match="one number for each"):
        training.forward_backward([bad], "cross_entropy").result(20)
    training.optim_step(types.AdamParams()).result(20)
    # An empty pass has taken its number, in its place.
    refused, after = service[1].asks[-2:]
    assert refused.operation.data == ()
    assert after.seq == refused.seq + 1


def test_a_future_that_waits_is_polled_until_it_is_done(service, training):
    _, engine = service
    before = engine.table[requests.OptimStep]
    engine.table[requests.OptimStep] = lambda _: None
    asked = len(engine.asks)
    try:
        future = training.optim_step(types.AdamParams())
        # Longer than one poll takes here.
        with pytest.raises(TimeoutError):
            future.future().result(0.6)
    finally:
        engine.table[requests.OptimStep] = before
    done = results.OptimStepResult(metrics={"grad_norm": 7.0})
    (held,) = engine.asks[asked:]
    answering = engine.answer(held, done)
    asyncio.run_coroutine_threadsafe(answering, engine.loop).result(5)
    assert future.result(20).metrics == {"grad_norm": 7.0}


@pytest.mark.parametrize(
    "name",
    [
        "ForwardBackwardRequest",
        "Datum",
        "Chunk",
        "Tensor",
        "SparseCsr",
        "LossConfigValue",
        "ForwardBackwardOutput",
        "ArrayRecord",
        "BatchedTensor",
        "SampleResponse",
        "SampledSequence",
        "TopkLogprobs",
    ],
)
def test_fields_have_the_numbers_and_types_that_the_sdk_gives_them(name):
    from tinker.proto import tinker_public_pb2

    ours = getattr(tinker_pb2, name).DESCRIPTOR
    theirs = getattr(tinker_public_pb2, name).DESCRIPTOR.fields_by_name
    for field in ours.fields:
        same = theirs[field.name]
        assert (field.number, field.type, field.is_repeated) == (
            same.number,
            same.type,
            same.is_repeated,
        )


IMAGE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("kind", ["image", "image_asset_pointer"])
def test_a_chunk_that_is_an_image_is_refused_by_name(service, training, kind):
    chunk = (
        types.ImageChunk(data=IMAGE, format="png", expected_tokens=4)
        if kind == "image"
        else types.ImageAssetPointerChunk(location="a.png", format="png", expected_tokens=4)
    )
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), chunk])
    asked = types.Datum(model_input=prompt, loss_fn_inputs=datum([1, 2]).loss_fn_inputs)
    why = "text alone is trained on here"
    # The SDK itself sends no pointers to be trained on.
    refusal = tinker.BadRequestError if kind == "image" else ValueError
    with pytest.raises(refusal, match=why if kind == "image" else "asset pointer|Unsupported"):
        training.forward_backward([asked], "cross_entropy").result(20)
    sampling = service[0].create_sampling_client(base_model="tiny/byte-llama").result(20)
    with pytest.raises(tinker.BadRequestError, match=f"the prompt has a chunk of '{kind}': {why}"):
        sampling.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result(20)
