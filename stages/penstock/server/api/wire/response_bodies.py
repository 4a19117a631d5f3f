"""Encode results of futures as protobuf or JSON bytes.

Pure functions. Small results are encoded in the event loop, others in a codec process. Only forward
passes and samples have a protobuf form. JSON has no non-finite numbers: a result with one is
returned as an error, never with another value in its place.
"""

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.server.api.checkpoint_uris import uri_scheme, write_path
from penstock.server.api.futures import ResultFormat
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.protocol.envelopes import Failure
from penstock.server.protocol.results import (
    CreateModelResult,
    ForwardBackwardResult,
    OptimStepResult,
    Result,
    SampleResult,
    SaveResult,
)
from penstock.server.protocol.types import Array, SampledSequence

ResultEncoding = Literal["json", "protobuf"]

INLINE_BYTES = {"json": 1 << 17, "protobuf": 1 << 22}
"""Maximum array bytes of a result for encoding in the event loop."""
INLINE_ARRAYS = 512  # Maximum number of samples for encoding in the event loop
MAX_JSON_BYTES = 16 << 20  # Maximum array bytes of a JSON result; JSON takes six times as many
CHUNK_BYTES = 1 << 16  # Chunk size of a response in bytes, sent as the client reads

TOO_LARGE = Failure(
    id="",
    error=(
        f"the result has over {MAX_JSON_BYTES} bytes of numbers, which is too much for JSON; send"
        " fewer samples at once, or ask for application/x-protobuf"
    ),
    category="user",
    code="invalid",
)

NOT_FINITE = (
    "the result holds numbers that are not finite: the computation diverged, or what it was given"
    " was out of range"
)

OPTIMIZER_STEP = "optimizer_step"  # The SDK's name of `step`: the number of optimizer steps taken
_JSON_DTYPES = {"float32": "float32", "int64": "int64", "int32": "int64"}
_PROTO_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64, "int32": pb.DTYPE_INT32}
NO_LOGPROB = -99999.0  # The SDK's marker of a position without top-k logprobs


class ResultJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How to encode a result, which follows in msgpack."""

    result_format: ResultFormat
    encoding: ResultEncoding


def is_small(result: Result, size: int, encoding: ResultEncoding) -> bool:
    """Whether encoding takes at most some milliseconds. `size`: bytes of its arrays."""
    parts = result.sequences if isinstance(result, SampleResult) else ()
    parts = result.outputs if isinstance(result, ForwardBackwardResult) else parts
    return size <= INLINE_BYTES[encoding] and len(parts) <= INLINE_ARRAYS


def negotiate_format(result: Result, accept: str) -> ResultEncoding:
    """The format for a client's Accept header."""
    has_proto = isinstance(result, ForwardBackwardResult | SampleResult)
    return "protobuf" if "protobuf" in accept and has_proto else "json"


def write(
    result: Result, result_format: ResultFormat, encoding: ResultEncoding, size: int
) -> bytes:
    """Encode the result."""
    if encoding == "protobuf":
        if isinstance(result, ForwardBackwardResult):
            return _proto_of_pass(result).SerializeToString()
        assert isinstance(result, SampleResult)
        return _proto_of_samples(result, result_format).SerializeToString()
    if size > MAX_JSON_BYTES:
        return encode(json_of_failure(TOO_LARGE))
    return encode(json_of_result(result, result_format))


def json_of_result(result: Result, shape: ResultFormat) -> dict[str, Any]:
    """The response for a completed request."""
    encoded: dict[str, Any] = {"type": shape.kind}
    match result:
        case ForwardBackwardResult():
            return encoded | {
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": [
                    {name: encode_tensor(array) for name, array in output.items()}
                    for output in result.outputs
                ],
                "metrics": result.metrics,
                "info": {},
            }
        case SampleResult():
            return encoded | _json_of_samples(result, shape)
        case OptimStepResult():
            is_sdk = shape.model is not None and uri_scheme(shape.model) == "tinker"
            # The SDK's clients add these to their own log, where `step` is their own counter.
            names = {"step": OPTIMIZER_STEP} if is_sdk else {}
            metrics = {names.get(name, name): value for name, value in result.metrics.items()}
            return encoded | {"metrics": metrics}
        case CreateModelResult():
            path = {} if shape.path is None else {"path": shape.path}
            return encoded | {"model_id": result.model} | path
        case SaveResult():
            sampler = {} if result.sampler is None else {"sampling_session_id": result.sampler}
            return encoded | {"path": write_path(result.model, result.name)} | sampler
        case _:
            return encoded if shape.model is None else encoded | {"model_id": shape.model}


def json_of_failure(failure: Failure) -> dict[str, Any]:
    """The response for a failed request."""
    return {"error": failure.error, "category": failure.category, "code": failure.code}


def encode(encoded: Mapping[str, Any]) -> bytes:
    """Encode as JSON; an error if a number is not finite."""
    try:
        # By default Python writes NaN, which is no JSON.
        return json.dumps(encoded, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        failure = Failure(id="", error=NOT_FINITE, category="unknown", code="not_finite")
        return json.dumps(json_of_failure(failure)).encode()


def encode_tensor(array: Array) -> dict[str, Any]:
    """An array as `data`, `dtype` and `shape`."""
    return {
        "data": array.numpy().reshape(-1).tolist(),
        "dtype": _JSON_DTYPES[array.dtype],
        "shape": list(array.shape),
    }


def _last_logprobs(logprobs: Array, shape: ResultFormat) -> npt.NDArray[np.float32]:
    """Logprobs of the prompt tokens, [T] or [T, k]; NaN where none were requested."""
    numbers = logprobs.numpy().astype(np.float32)
    if shape.last_prompt_logprobs is not None:
        numbers[: max(0, len(numbers) - shape.last_prompt_logprobs)] = np.nan
    return numbers


def _json_of_samples(result: SampleResult, shape: ResultFormat) -> dict[str, Any]:
    """Samples; null for a prompt token without logprob."""
    encoded: dict[str, Any] = {
        "sequences": [_json_of_sequence(sequence) for sequence in result.sequences]
    }
    if result.prompt_logprobs is not None:
        numbers = _last_logprobs(result.prompt_logprobs, shape).tolist()
        encoded["prompt_logprobs"] = [None if n != n else n for n in numbers]
    tokens, logprobs = result.topk_prompt_tokens, result.topk_prompt_logprobs
    if tokens is not None and logprobs is not None:
        encoded["topk_prompt_logprobs"] = _json_of_topk(tokens, _last_logprobs(logprobs, shape))
    return encoded


def _json_of_sequence(sequence: SampledSequence) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens.numpy().tolist(),
        "logprobs": sequence.logprobs.numpy().tolist(),
    }
    if sequence.topk_tokens is not None and sequence.topk_logprobs is not None:
        encoded["topk_logprobs"] = _json_of_topk(
            sequence.topk_tokens, sequence.topk_logprobs.numpy()
        )
    return encoded


def _json_of_topk(tokens: Array, logprobs: npt.NDArray[Any]) -> list[list[list[Any]] | None]:
    """Top-k logprobs from [T, k] tokens and logprobs; null where these are NaN."""
    return [
        None if np.isnan(values).any() else list(map(list, zip(ids, values, strict=True)))
        for ids, values in zip(tokens.numpy().tolist(), logprobs.tolist(), strict=True)
    ]


def _proto_of_pass(result: ForwardBackwardResult) -> pb.ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        # The SDK aggregates metrics of several requests by the suffix after the colon.
        message.metrics[name if ":" in name else f"{name}:mean"] = value
    # A record has one trailing shape, and samples may differ in targets per token.
    for _, group in groupby(
        result.outputs, lambda output: {name: array.shape[1:] for name, array in output.items()}
    ):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
        for name, first in outputs[0].items():
            arrays = [output[name] for output in outputs]
            tensor = record.fields[name]
            tensor.data = b"".join(array.data for array in arrays)
            ends = np.cumsum([0, *(len(array.data) for array in arrays)])
            tensor.offsets = ends.astype("<i8").tobytes()
            tensor.dtype = _PROTO_DTYPES[first.dtype]
            tensor.trailing_shape.extend(first.shape[1:])
    return message


def _proto_of_samples(result: SampleResult, shape: ResultFormat) -> pb.SampleResponse:
    message = pb.SampleResponse()
    for sampled in result.sequences:
        is_stop = sampled.stop_reason == "stop"
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if is_stop else pb.STOP_REASON_LENGTH,
            tokens=sampled.tokens.numpy().astype("<i4").tobytes(),
            logprobs=sampled.logprobs.numpy().astype("<f4").tobytes(),
        )
        if sampled.topk_tokens is not None and sampled.topk_logprobs is not None:
            topk = _proto_of_topk(sampled.topk_tokens, sampled.topk_logprobs.numpy())
            sequence.topk_sampled_logprobs.CopyFrom(topk)
    if result.prompt_logprobs is not None:
        numbers = _last_logprobs(result.prompt_logprobs, shape)
        message.prompt_logprobs = numbers.astype("<f4").tobytes()
    tokens, logprobs = result.topk_prompt_tokens, result.topk_prompt_logprobs
    if tokens is not None and logprobs is not None:
        topk = _proto_of_topk(tokens, _last_logprobs(logprobs, shape))
        message.topk_prompt_logprobs.CopyFrom(topk)
    return message


def _proto_of_topk(tokens: Array, logprobs: npt.NDArray[Any]) -> pb.TopkLogprobs:
    """Encode [T, k] top-k tokens and logprobs, NaN where there are none."""
    is_none = np.isnan(logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(is_none, 0, tokens.numpy()).astype("<i4").tobytes(),
        logprobs=np.where(is_none, NO_LOGPROB, logprobs).astype("<f4").tobytes(),
        length=tokens.shape[0],
        k=tokens.shape[1],
    )


class ChunkedResponse(Response):
    """A response sent in chunks, so that no connection buffers a copy."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        head = {"type": "http.response.start", "status": self.status_code}
        await send(head | {"headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, max(1, len(body)), CHUNK_BYTES):
            piece = bytes(body[start : start + CHUNK_BYTES])
            is_last = start + CHUNK_BYTES >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
