"""Encode results of futures as JSON: forward passes and samples for clients without protobuf, and
all other results for all clients.

JSON has no non-finite numbers. A result with one is returned as an error, never with another value
in its place.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.server.api.checkpoint_uris import uri_scheme, write_path
from penstock.server.api.futures import ResultFormat
from penstock.server.api.wire.decode_params import user_metadata
from penstock.server.protocol.envelopes import Failure
from penstock.server.protocol.results import (
    CreateModelResult,
    ForwardBackwardResult,
    OptimStepResult,
    Result,
    SampleResult,
    SaveResult,
)
from penstock.server.protocol.types import Array, Checkpoint, ModelInfo, SampledSequence

NOT_FINITE = (
    "the result holds numbers that are not finite: the computation diverged, or what it was given"
    " was out of range"
)

OPTIMIZER_STEP = "optimizer_step"
"""The SDK's name of `step`: the number of optimizer steps taken."""

_JSON_DTYPES = {"float32": "float32", "int64": "int64", "int32": "int64"}


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
            return encoded | _encode_samples(result, shape)
        case OptimStepResult():
            return encoded | {"metrics": _step_metrics(result, shape)}
        case CreateModelResult():
            path = {} if shape.path is None else {"path": shape.path}
            return encoded | {"model_id": result.model} | path
        case SaveResult():
            encoded["path"] = write_path(result.model, result.name)
            return (
                encoded
                if result.sampler is None
                else encoded | {"sampling_session_id": result.sampler}
            )
        case _:
            return encoded if shape.model is None else encoded | {"model_id": shape.model}


def json_of_failure(failure: Failure) -> dict[str, Any]:
    """The response for a failed request."""
    return {"error": failure.error, "category": failure.category, "code": failure.code}


def encode(encoded: Mapping[str, Any]) -> bytes:
    """Encode as JSON; an error if a number is not finite."""
    try:
        return json.dumps(encoded, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        failure = Failure(id="", error=NOT_FINITE, category="unknown", code="not_finite")
        return json.dumps(json_of_failure(failure)).encode()


def encode_tensor(array: Array) -> dict[str, Any]:
    """An array as `data`, `dtype` and `shape`."""
    numbers = array.numpy()
    return {
        "data": numbers.reshape(-1).tolist(),
        "dtype": _JSON_DTYPES[array.dtype],
        "shape": list(array.shape),
    }


def encode_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """A stored checkpoint, with the field names of all clients."""
    return {
        "checkpoint_id": checkpoint.name,
        "checkpoint_type": checkpoint.kind,
        "time": format_time(checkpoint.time),
        "path": write_path(checkpoint.model, checkpoint.name),
        "tinker_path": f"tinker://{checkpoint.model}/{checkpoint.name}",
        "size_bytes": checkpoint.size,
        "public": checkpoint.public,
        "expires_at": None if checkpoint.expires is None else format_time(checkpoint.expires),
        "user_metadata": checkpoint.user_metadata,
    }


def encode_run(run: ModelInfo, owner: str) -> dict[str, Any]:
    """A model that is or was trained."""
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.model,
        "base_model": run.base_model,
        "model_owner": owner,
        "is_lora": run.rank is not None,
        "corrupted": run.corrupted,
        "lora_rank": run.rank,
        "last_request_time": format_time(run.last_request),
        "last_checkpoint": last and encode_checkpoint(last),
        "last_sampler_checkpoint": sampler and encode_checkpoint(sampler),
        "user_metadata": user_metadata(run.user_metadata),
    }


def format_time(seconds: float) -> str:
    """ISO 8601 of seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def last_logprobs(logprobs: Array, shape: ResultFormat) -> npt.NDArray[np.float32]:
    """Logprobs of the prompt tokens, [T] or [T, k]; NaN where none were requested."""
    numbers = logprobs.numpy().astype(np.float32)
    if shape.last_prompt_logprobs is not None:
        numbers[: max(0, len(numbers) - shape.last_prompt_logprobs)] = np.nan
    return numbers


def _step_metrics(result: OptimStepResult, shape: ResultFormat) -> dict[str, float]:
    """The SDK's clients add step metrics to their own log, where `step` is their own counter."""
    if shape.model is None or uri_scheme(shape.model) != "tinker":
        return result.metrics
    return {
        OPTIMIZER_STEP if name == "step" else name: value for name, value in result.metrics.items()
    }


def _encode_samples(result: SampleResult, shape: ResultFormat) -> dict[str, Any]:
    """Samples; null for a prompt token without logprob."""
    encoded: dict[str, Any] = {
        "sequences": [_encode_sequence(sequence) for sequence in result.sequences]
    }
    if result.prompt_logprobs is not None:
        numbers = last_logprobs(result.prompt_logprobs, shape).tolist()
        encoded["prompt_logprobs"] = [None if n != n else n for n in numbers]
    tokens, logprobs = result.topk_prompt_tokens, result.topk_prompt_logprobs
    if tokens is not None and logprobs is not None:
        encoded["topk_prompt_logprobs"] = _encode_topk(tokens, last_logprobs(logprobs, shape))
    return encoded


def _encode_sequence(sequence: SampledSequence) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens.numpy().tolist(),
        "logprobs": sequence.logprobs.numpy().tolist(),
    }
    if sequence.topk_tokens is not None and sequence.topk_logprobs is not None:
        encoded["topk_logprobs"] = _encode_topk(
            sequence.topk_tokens, sequence.topk_logprobs.numpy()
        )
    return encoded


def _encode_topk(tokens: Array, logprobs: npt.NDArray[Any]) -> list[list[list[Any]] | None]:
    """Top-k logprobs from [T, k] tokens and logprobs; null where these are NaN."""
    return [
        None if np.isnan(values).any() else list(map(list, zip(ids, values, strict=True)))
        for ids, values in zip(tokens.numpy().tolist(), logprobs.tolist(), strict=True)
    ]
