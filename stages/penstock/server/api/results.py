"""Results of futures as JSON: those of works that are not passes and samples for all clients, and
those two for clients that read no protobuf.

A number that is not finite has no place in JSON. Such a result is told as a failure, never with
another number in its place.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from penstock.server.api.futures import Shape
from penstock.server.api.paths import write_path
from penstock.server.protocol.asks import Failure
from penstock.server.protocol.results import (
    Loaded,
    ModelMade,
    Passed,
    Result,
    Sampled,
    Saved,
    Stepped,
)
from penstock.server.protocol.values import Array, Checkpoint, Run

NOT_FINITE = (
    "the result holds numbers that are not finite: the computation diverged, or what it was given"
    " was out of range"
)

_WRITTEN = {"float32": "float32", "int64": "int64", "int32": "int64"}


def json_of_result(result: Result, shape: Shape) -> dict[str, Any]:
    """What a client is told of the end of a work that was done."""
    told: dict[str, Any] = {"type": shape.kind}
    match result:
        case Passed():
            return {
                "type": shape.kind,
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": [
                    {name: tensor_of(array) for name, array in output.items()}
                    for output in result.outputs
                ],
                "metrics": result.metrics,
                "info": {},
            }
        case Sampled():
            return told | _sampled(result, shape)
        case Stepped():
            return told | {"metrics": result.metrics}
        case ModelMade():
            return told | {"model_id": result.model} | _path(shape)
        case Loaded():
            return told | {"model_id": result.model} | _path(shape)
        case Saved():
            told["path"] = write_path(result.model, result.name)
            return (
                told if result.sampler is None else told | {"sampling_session_id": result.sampler}
            )
        case _:
            return told if shape.model is None else told | {"model_id": shape.model}


def json_of_failure(failure: Failure) -> dict[str, Any]:
    """What a client is told of the other end of a work."""
    return {"error": failure.error, "category": failure.category, "code": failure.code}


def encode(told: Mapping[str, Any]) -> bytes:
    """JSON, or a failure where a number is not finite."""
    try:
        return json.dumps(told, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        failure = Failure(id="", error=NOT_FINITE, category="unknown", code="not_finite")
        return json.dumps(json_of_failure(failure)).encode()


def tensor_of(array: Array) -> dict[str, Any]:
    """An array as `data`, `dtype` and `shape`."""
    numbers = array.numpy()
    return {
        "data": numbers.reshape(-1).tolist(),
        "dtype": _WRITTEN[array.dtype],
        "shape": list(array.shape),
    }


def checkpoint_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """One that is kept, by the names of all clients."""
    return {
        "checkpoint_id": checkpoint.name,
        "checkpoint_type": checkpoint.kind,
        "time": written_time(checkpoint.time),
        "path": write_path(checkpoint.model, checkpoint.name),
        "tinker_path": f"tinker://{checkpoint.model}/{checkpoint.name}",
        "size_bytes": checkpoint.size,
        "public": checkpoint.public,
        "expires_at": None if checkpoint.expires is None else written_time(checkpoint.expires),
    }


def run_of(run: Run, owner: str) -> dict[str, Any]:
    """A model that is trained, or was."""
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.model,
        "base_model": run.base_model,
        "model_owner": owner,
        "is_lora": run.rank is not None,
        "corrupted": run.corrupted,
        "lora_rank": run.rank,
        "last_request_time": written_time(run.last_request),
        "last_checkpoint": last and checkpoint_of(last),
        "last_sampler_checkpoint": sampler and checkpoint_of(sampler),
        "user_metadata": run.user_metadata,
    }


def written_time(seconds: float) -> str:
    """ISO 8601 of seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def prompt_logprobs_of(result: Sampled, shape: Shape) -> Array | None:
    """float32 [T], NaN where none was asked for."""
    array = result.prompt_logprobs
    if array is None or shape.last_prompt_logprobs is None:
        return array
    numbers = array.numpy().astype(np.float32)
    numbers[: max(0, len(numbers) - shape.last_prompt_logprobs)] = np.nan
    return Array.of(numbers, "float32")


def _path(shape: Shape) -> dict[str, Any]:
    return {} if shape.path is None else {"path": shape.path}


def _sampled(result: Sampled, shape: Shape) -> dict[str, Any]:
    """Samples; of a token of the prompt that has no log-probability there is null."""
    told: dict[str, Any] = {
        "sequences": [
            {
                "stop_reason": one.stop_reason,
                "tokens": one.tokens.numpy().tolist(),
                "logprobs": one.logprobs.numpy().tolist(),
            }
            for one in result.sequences
        ]
    }
    prompt = prompt_logprobs_of(result, shape)
    if prompt is not None:
        told["prompt_logprobs"] = [None if n != n else n for n in prompt.numpy().tolist()]
    if result.topk_prompt_tokens is not None and result.topk_prompt_logprobs is not None:
        tokens, logprobs = result.topk_prompt_tokens.numpy(), result.topk_prompt_logprobs.numpy()
        told["topk_prompt_logprobs"] = [
            None if np.isnan(values).any() else list(map(list, zip(ids, values, strict=True)))
            for ids, values in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]
    return told
