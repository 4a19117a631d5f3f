"""Requests and results in protobuf, as the SDK of Tinker sends and reads them."""

import numpy as np
from google.protobuf.message import DecodeError

from penstock.server.api import tinker_pb2 as pb
from penstock.server.api.data import data_of_proto
from penstock.server.api.futures import Shape
from penstock.server.api.losses import choose
from penstock.server.api.refusals import Refusal
from penstock.server.api.results import prompt_logprobs_of
from penstock.server.protocol.results import Passed, Result, Sampled
from penstock.server.protocol.values import Array
from penstock.server.protocol.works import Pass

DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
}


def read_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """The message. Raises Refusal for bytes that are none."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise Refusal("the body is no ForwardBackwardRequest") from error


def pass_of(request: pb.ForwardBackwardRequest) -> Pass:
    """The work that it asks for. Raises Refusal naming what is wrong."""
    params: dict[str, float | str] = {}
    if request.loss_fn_config_v2:
        for name, value in request.loss_fn_config_v2.items():
            params[name] = value.text if value.WhichOneof("value") == "text" else value.number
    else:
        params.update(request.loss_fn_config)
    if not request.data:
        raise Refusal("there are no samples in the request")
    chosen = choose(request.loss_fn, params)
    return Pass(
        model=request.model_id,
        data=data_of_proto(request.data, chosen.loss),
        loss=chosen.loss,
        params=chosen.params,
        forward_only=request.forward_only,
        per="sum",
    )


def write_result(result: Result, shape: Shape) -> bytes | None:
    """Passes and samples; None for other results, which have no message."""
    match result:
        case Passed():
            return _passed(result).SerializeToString()
        case Sampled():
            return _sampled(result, shape).SerializeToString()
        case _:
            return None


def _passed(result: Passed) -> pb.ForwardBackwardOutput:
    told = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        # The SDK joins those of several requests by what stands after the colon.
        told.metrics[name if ":" in name else f"{name}:mean"] = value
    if result.outputs:
        record = told.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(result.outputs))
        for name, first in result.outputs[0].items():
            arrays = [output[name] for output in result.outputs]
            tensor = record.fields[name]
            tensor.data = b"".join(array.data for array in arrays)
            ends = np.cumsum([0, *(len(array.data) for array in arrays)])
            tensor.offsets = ends.astype("<i8").tobytes()
            tensor.dtype = DTYPES[first.dtype]
            tensor.trailing_shape.extend(first.shape[1:])
    return told


def _sampled(result: Sampled, shape: Shape) -> pb.SampleResponse:
    told = pb.SampleResponse()
    for one in result.sequences:
        told.sequences.add(
            stop_reason=(
                pb.STOP_REASON_STOP if one.stop_reason == "stop" else pb.STOP_REASON_LENGTH
            ),
            tokens=_bytes(one.tokens, "<i4"),
            logprobs=_bytes(one.logprobs, "<f4"),
        )
    prompt = prompt_logprobs_of(result, shape)
    if prompt is not None:
        told.prompt_logprobs = _bytes(prompt, "<f4")
    tokens, logprobs = result.topk_prompt_tokens, result.topk_prompt_logprobs
    if tokens is not None and logprobs is not None:
        told.topk_prompt_logprobs.token_ids = _bytes(tokens, "<i4")
        told.topk_prompt_logprobs.logprobs = _bytes(logprobs, "<f4")
        told.topk_prompt_logprobs.length, told.topk_prompt_logprobs.k = tokens.shape
    return told


def _bytes(array: Array, kind: str) -> bytes:
    return array.numpy().astype(kind).tobytes()
