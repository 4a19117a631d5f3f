"""Decode LoRA, optimizer, sampling and quantization parameters from client requests."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.api.errors import ApiError
from penstock.server.api.schemas.requests import (
    AdamBody,
    LoraBody,
    OptimizerBody,
    Quantization,
    SamplingBody,
    StepBody,
)
from penstock.server.protocol import types
from penstock.server.protocol.types import AdamParams, LoraConfig, OptimizerConfig, SamplingParams

STEP = "optimizer."  # Metadata key prefix of optimizer parameters of a model
DISPLAY_NAME = "session.display_name"  # Metadata key of a session's display name


def parse_lora(body: LoraBody | None) -> LoraConfig | None:
    """The LoRA config; None if not set. Raises ApiError if it has no rank."""
    if body is None or not body.model_fields_set:
        return None
    rank = body.rank if body.rank is not None else body.lora_rank
    if rank is None or None not in (body.rank, body.lora_rank):
        raise ApiError("lora_config needs a rank: rank or lora_rank, one of them")
    fields: dict[str, Any] = types.common_fields(body, LoraConfig) | {"rank": rank}
    return LoraConfig(alpha=body.lora_alpha, **fields)


def parse_optimizer(body: OptimizerBody | None) -> OptimizerConfig:
    """The optimizer config, without the per-step parameters."""
    if body is None:
        return OptimizerConfig()
    return OptimizerConfig(
        kind=body.type, dtype=body.optimizer_dtype, kwargs=dict(body.optimizer_kwargs or {})
    )


def parse_metadata(
    client_metadata: Mapping[str, Any] | None, optimizer: OptimizerBody | None
) -> dict[str, str]:
    """Metadata stored with a model: the client's metadata, with non-strings as JSON, and the
    default Adam parameters of steps that set none."""
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (client_metadata or {}).items()
    }
    if len(user_metadata(metadata)) < len(metadata):
        raise ApiError(
            f"no name in user_metadata may begin with {STEP!r} or be {DISPLAY_NAME!r}: these"
            " store optimizer_config and display_name"
        )
    numbers: dict[str, float | None] = {}
    if optimizer is not None:
        betas = optimizer.betas or (None, None)
        numbers = {
            "learning_rate": optimizer.learning_rate,
            "beta1": betas[0],
            "beta2": betas[1],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        }
    step_params = {
        # `float` reads exactly the number back that `repr` wrote.
        STEP + name: repr(number)
        for name, number in numbers.items()
        if number is not None
    }
    return metadata | step_params


def user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The client's metadata of a model or session, without internal keys."""
    return {
        name: text
        for name, text in metadata.items()
        if not name.startswith(STEP) and name != DISPLAY_NAME
    }


def parse_adam_params(step: StepBody, metadata: Mapping[str, str]) -> AdamParams:
    """The Adam parameters of a step: its own, then the model's, then Adam's defaults."""
    stored = {
        name: float(text)
        for name in AdamBody.model_fields
        if (text := metadata.get(STEP + name)) is not None
    }
    params = step.adam_params.model_dump() if step.adam_params else stored
    if step.learning_rate is not None:
        params["learning_rate"] = step.learning_rate
    if step.gradient_clip is not None:
        params["grad_clip_norm"] = step.gradient_clip
    return AdamParams(**params)


def parse_sampling_params(body: SamplingBody) -> SamplingParams:
    """Sampling parameters. An empty list of stop sequences disables all of them, including the
    end-of-sequence token, which otherwise also stops."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    top_k = -1 if body.top_k == 0 else body.top_k
    return SamplingParams(
        **types.common_fields(body, SamplingParams) | {"top_k": top_k},
        stop_tokens=tuple(part for part in stop if isinstance(part, int)),
        stop_texts=tuple(part for part in stop if isinstance(part, str)),
        ignore_eos=body.stop == [],
    )


def parse_quantization(quantization: Quantization | None) -> types.Quantization | None:
    """Convert to the type of the protocol: lists of integers to tuples, other lists to strings."""
    converted: types.Quantization = {}
    for name, value in (quantization or {}).items():
        if isinstance(value, list):
            numbers = tuple(part for part in value if isinstance(part, int))
            converted[name] = numbers if len(numbers) == len(value) else str(value)
        else:
            converted[name] = value
    return None if quantization is None else converted
