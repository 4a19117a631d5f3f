"""Chunks that are images: decoded to what the image processor and the tokenizer make of them, or
refused with the sample and the chunk named."""

import asyncio
import json
import math
from base64 import b64encode

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from penstock.media.decode import MAX_PIXELS, decode
from penstock.server.api.errors import ApiError
from penstock.server.api.wire import chunks as wire
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.chunks import ChunkDecoder
from penstock.server.api.wire.codec_pool import IMAGE_MEMORY, CodecPool, _Codec
from penstock.server.api.wire.request_bodies import BodyDecoder, BodyJob, NotInlineError
from penstock.server.images.expand import load_expander
from penstock.server.protocol.requests import ForwardBackward
from tests.media.pictures import encoded, picture, png_header
from tests.media.tiny_processors import load_processor, write_processor

FILE = picture(1, 60, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_processor("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def expander(folder):
    return load_expander(str(folder))


def text(*tokens):
    return {"type": "encoded_text", "tokens": list(tokens)}


def image(content=FILE, format="png", **more):
    return {"type": "image", "data": b64encode(content).decode(), "format": format, **more}


def message(content=FILE, format="png", **more):
    return pb.Chunk(image=pb.ImageChunk(data=content, format=format, **more))


def refusal(expander, *chunks):
    with pytest.raises(ApiError) as caught:
        ChunkDecoder(expander).from_json(list(chunks), "sample 3")
    return caught.value


def test_an_image_is_the_tensors_and_tokens_of_prepare_in_json_and_protobuf(folder, expander):
    processor = load_processor(folder)
    tensors = processor.process(decode(FILE))
    tokens = processor.processor.tokenizer(processor.replacement(tensors))["input_ids"]
    tokens_of_text = np.array([7, 8], "<i4").tobytes()
    seven_eight = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens_of_text))
    nine = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\t\0\0\0"))
    count = len(tokens)
    for decode_chunks in (
        lambda chunks: chunks.from_json([text(7, 8), image(expected_tokens=count), text(9)], "x"),
        lambda chunks: chunks.from_proto(
            [
                seven_eight,
                message(expected_tokens=count),
                nine,
            ],
            "x",
        ),
    ):
        chunks = ChunkDecoder(expander)
        found = decode_chunks(chunks)
        assert found.tokens.tolist() == [7, 8, *tokens, 9]
        assert found.images == (0,)
        [processed] = chunks.images
        assert processed.num_tokens == tokens.count(processor.token_id) == count
        assert processed.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            mine = processed.tensors[name].stored()
            assert (mine.dtype, mine.numpy().tobytes()) == (tensor.dtype, tensor.numpy().tobytes())


def test_an_image_of_several_samples_is_processed_once(expander, monkeypatch):
    calls = []
    expand = type(expander).expand
    monkeypatch.setattr(
        type(expander),
        "expand",
        lambda self, *given, **how: calls.append(given) or expand(self, *given, **how),
    )
    chunks = ChunkDecoder(expander)
    found = [chunks.from_json([image(), text(1), image()], "x") for _ in range(3)]
    assert [one.images for one in found] == [(0, 0)] * 3
    assert (len(calls), len(chunks.images)) == (1, 1)


def test_an_image_alone_and_one_of_several_are_processed_once_each(tmp_path):
    expander = load_expander(str(write_processor("llava_onevision", tmp_path)))
    processor = expander.processor
    tokens = [
        processor.replacement(processor.process(decode(FILE), several=several)).count("<image>")
        for several in (False, True)
    ]
    assert tokens[0] > tokens[1] == 4 + 1
    chunks = ChunkDecoder(expander)
    inputs = ([image()], [image(), text(1), image()], [image()])
    found = [chunks.from_json(each, "x") for each in inputs]
    found.append(chunks.from_proto([message(), message()], "x"))
    assert [one.images for one in found] == [(0,), (1, 1), (0,), (1, 1)]
    assert [one.num_tokens for one in chunks.images] == tokens
    assert [len(one.tokens) for one in found] == [tokens[0], 11, tokens[0], 10]


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (image(png_header(20_000, 20_000)), "cannot be used: it has too many pixels"),
        (image(FILE[:200]), "cannot be used: it is damaged"),
        (image(b"<svg/>"), "cannot be used: it is an SVG drawing"),
        (image(b""), "cannot be used: it is empty"),
        (image(format="jpeg"), "its format is jpeg, and the file is PNG"),
        (image(picture(1, kind="JPEG")), "its format is png, and the file is JPEG"),
        (image(picture(1, kind="WEBP"), "webp"), "its format is 'webp'; it may be png or jpeg"),
        (image(expected_tokens=5), "is an image of .* tokens, and its expected_tokens is 5"),
        (image() | {"data": "#"}, "its data is no base64"),
        (image() | {"data": None}, "its data is no text"),
        (image(size=4), "has size, which an image does not have"),
        (image(expected_tokens=True), "expected_tokens of chunk 1 of sample 3 is no whole number"),
        ({"type": "encoded_text"}, "has no list of tokens"),
    ],
)
def test_a_chunk_that_cannot_be_used_is_refused_by_its_place(expander, chunk, why):
    error = refusal(expander, text(1), chunk)
    assert (error.status_code, error.category) == (400, "user")
    assert "chunk 1 of sample 3" in error.error
    with pytest.raises(ApiError, match=why):
        raise error


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("image_asset_pointer", "send the image itself, as a chunk of type 'image'"),
        ("dmel", "audio is not read here"),
        ("video", "text and images are read here"),
    ],
)
def test_other_chunks_are_refused_by_their_kind(expander, kind, why):
    error = refusal(expander, {"type": kind})
    assert error.error == f"sample 3 has a chunk of {kind!r}: {why}"
    assert refusal(None, {"type": kind}).error.endswith("text alone is trained on here")
    assert refusal(None, image()).error.endswith("'image': text alone is trained on here")


def test_dimensions_of_the_client_are_refused(expander):
    with pytest.raises(ApiError, match="chunk 0 of x has override_dimensions"):
        ChunkDecoder(expander).from_proto([message(override_dimensions=pb.OtherChunk())], "x")


@pytest.mark.parametrize(
    ("name", "limit", "count"),
    [("MAX_IMAGES", 2, 3), ("MAX_IMAGE_BYTES", 20_000, 9), ("MAX_NUMBERS", 10, 9)],
)
def test_the_images_of_a_request_are_limited(expander, monkeypatch, name, limit, count):
    monkeypatch.setattr(wire, name, limit)
    images = [image(picture(seed, 60, 40)) for seed in range(count)]
    ChunkDecoder(expander).from_json(images[:1], "x")
    assert refusal(expander, *images).status_code == 413


def test_bodies_with_images_are_decoded_in_a_process_with_the_processor(expander, monkeypatch):
    inputs = {"target_tokens": [1] * 3}
    body = {"model_id": "sess-1:train:0", "seq_id": 1}
    passed = {"data": [{"model_input": {"chunks": [image()]}, "loss_fn_inputs": inputs}]}
    body["forward_backward_input"] = passed | {"loss_fn": "cross_entropy"}
    count = len(expander.expand(FILE, "png", b"").tokens)
    inputs["target_tokens"] = [1] * count
    packed = json.dumps(body).encode()
    job = BodyJob(
        call="forward_backward",
        kind="application/json",
        encoding="identity",
        max_bytes=1 << 20,
        takes_images=True,
    )
    with pytest.raises(NotInlineError):
        BodyDecoder(job, is_inline=True).decode(packed)
    with pytest.raises(ApiError, match="text alone is trained on here"):
        BodyDecoder(structs.replace(job, takes_images=False), is_inline=True).decode(packed)
    _, operation = BodyDecoder(job, is_inline=False, expander=expander).decode(packed)
    assert isinstance(operation, ForwardBackward)
    assert (len(operation.images), operation.data[0].images) == (1, (0,))
    assert operation.data[0].tokens.shape == (count,)

    started = []

    async def start(module, *arguments):
        started.append((module, *arguments))

    monkeypatch.setattr(_Codec, "start", start)
    for folder in ("", "/folder"):
        asyncio.run(CodecPool(1 << 20, folder)._start())
    [(text_module, _, memory), (image_module, _, more, folder)] = started
    assert text_module == "penstock.server.api.wire.codec_process"
    assert (image_module, folder) == ("penstock.server.images.codec_process", "/folder")
    assert int(more) - int(memory) == IMAGE_MEMORY


@pytest.mark.exhaustive
def test_the_largest_image_fits_into_the_memory_of_a_process(folder):
    side = math.isqrt(MAX_PIXELS)
    body = {"model_id": "sess-1:train:0", "seq_id": 1}
    large = image(encoded(Image.new("RGBA", (side, side))), expected_tokens=1)
    passed = {"data": [{"model_input": {"chunks": [large]}, "loss_fn_inputs": {"labels": []}}]}
    body["forward_backward_input"] = passed | {"loss_fn": "cross_entropy"}
    packed = json.dumps(body).encode()
    job = BodyJob(
        call="forward_backward",
        kind="application/json",
        encoding="identity",
        max_bytes=1 << 20,
        takes_images=True,
    )

    async def scenario():
        pool = CodecPool(1 << 20, str(folder))
        async with pool.decoding("owner", job, (packed,)) as (reply, _):
            await pool.stop()
            return reply.error

    error = asyncio.run(scenario())
    assert error is not None
    # It was processed, and is no image of one token.
    assert (error.status, "its expected_tokens is 1" in error.error) == (400, True)


def test_copies_of_an_image_in_a_prompt_are_limited(expander, monkeypatch):
    decoder = ChunkDecoder(expander)
    _, indices = decoder.from_json([image(picture(0, 60, 40))] * 9, "x")
    monkeypatch.setattr(wire, "MAX_IMAGE_BYTES", 2 * decoder.images[0].num_bytes)
    assert len(decoder.each_image(indices[:2])) == 2
    with pytest.raises(ApiError) as error:
        decoder.each_image(indices)
    assert error.value.status_code == 413
