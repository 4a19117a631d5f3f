"""Protobuf requests and results of the Tinker SDK."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from penstock.server.api.errors import ApiError
from penstock.server.api.futures import ResultFormat
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.chunks import ChunkDecoder
from penstock.server.api.wire.datums import datums_from_proto
from penstock.server.api.wire.encode_results import last_logprobs
from penstock.server.api.wire.loss_names import LossSpec, resolve_loss
from penstock.server.protocol.requests import ForwardBackward
from penstock.server.protocol.results import ForwardBackwardResult, Result, SampleResult
from penstock.server.protocol.types import Array

DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
}

NO_LOGPROB = -99999.0
"""The SDK's marker of a position without top-k logprobs."""


def read_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the message. Raises ApiError for invalid bytes."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ApiError("the body is no ForwardBackwardRequest") from error


def parse_loss(request: pb.ForwardBackwardRequest) -> LossSpec:
    """The requested loss and its parameters. Raises ApiError if unknown."""
    params: dict[str, float | str] = {}
    if request.loss_fn_config_v2:
        for name, value in request.loss_fn_config_v2.items():
            params[name] = value.text if value.WhichOneof("value") == "text" else value.number
    else:
        params.update(request.loss_fn_config)
    if not request.data:
        raise ApiError("there are no samples in the request")
    return resolve_loss(request.loss_fn, params)


def parse_forward_backward(
    request: pb.ForwardBackwardRequest, loss_spec: LossSpec, chunks: ChunkDecoder
) -> ForwardBackward:
    """The requested forward-backward pass. Raises ApiError naming what is invalid."""
    data = datums_from_proto(request.data, loss_spec.loss, chunks)
    return ForwardBackward(
        model=request.model_id,
        data=data,
        images=tuple(chunks.images),
        loss=loss_spec.loss,
        params=loss_spec.params,
        forward_only=request.forward_only,
        loss_reduction="sum",
    )


def write_result(result: Result, shape: ResultFormat) -> bytes | None:
    """Encode forward passes and samples; None for other results, which have no protobuf message."""
    match result:
        case ForwardBackwardResult():
            return _encode_pass(result).SerializeToString()
        case SampleResult():
            return _encode_samples(result, shape).SerializeToString()
        case _:
            return None


def _encode_pass(result: ForwardBackwardResult) -> pb.ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        # The SDK aggregates metrics of several requests by the suffix after the colon.
        message.metrics[name if ":" in name else f"{name}:mean"] = value
    # A record has one trailing shape, and samples may differ in targets per token.
    for _, group in groupby(result.outputs, key=_trailing_shapes):
        _add_record(message, list(group))
    return message


def _trailing_shapes(output: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in output.items()}


def _add_record(message: pb.ForwardBackwardOutput, outputs: Sequence[dict[str, Array]]) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
    for name, first in outputs[0].items():
        arrays = [output[name] for output in outputs]
        tensor = record.fields[name]
        tensor.data = b"".join(array.data for array in arrays)
        ends = np.cumsum([0, *(len(array.data) for array in arrays)])
        tensor.offsets = ends.astype("<i8").tobytes()
        tensor.dtype = DTYPES[first.dtype]
        tensor.trailing_shape.extend(first.shape[1:])


def _encode_samples(result: SampleResult, shape: ResultFormat) -> pb.SampleResponse:
    message = pb.SampleResponse()
    for sampled in result.sequences:
        sequence = message.sequences.add(
            stop_reason=(
                pb.STOP_REASON_STOP if sampled.stop_reason == "stop" else pb.STOP_REASON_LENGTH
            ),
            tokens=_to_bytes(sampled.tokens, "<i4"),
            logprobs=_to_bytes(sampled.logprobs, "<f4"),
        )
        if sampled.topk_tokens is not None and sampled.topk_logprobs is not None:
            numbers = sampled.topk_logprobs.numpy().astype(np.float32)
            sequence.topk_sampled_logprobs.CopyFrom(
                _encode_topk(sampled.topk_tokens.numpy(), numbers)
            )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = (
            last_logprobs(result.prompt_logprobs, shape).astype("<f4").tobytes()
        )
    tokens, logprobs = result.topk_prompt_tokens, result.topk_prompt_logprobs
    if tokens is not None and logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(
            _encode_topk(tokens.numpy(), last_logprobs(logprobs, shape))
        )
    return message


def _encode_topk(
    tokens: npt.NDArray[np.generic], logprobs: npt.NDArray[np.float32]
) -> pb.TopkLogprobs:
    """Encode [T, k] top-k tokens and logprobs, NaN where there are none."""
    is_none = np.isnan(logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(is_none, 0, tokens).astype("<i4").tobytes(),
        logprobs=np.where(is_none, NO_LOGPROB, logprobs).astype("<f4").tobytes(),
        length=tokens.shape[0],
        k=tokens.shape[1],
    )


def _to_bytes(array: Array, kind: str) -> bytes:
    return array.numpy().astype(kind).tobytes()
