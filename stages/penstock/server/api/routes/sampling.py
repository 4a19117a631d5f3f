"""Sampling routes: sampling sessions and completions."""

from fastapi import Request

from penstock.server.api.checkpoint_uris import ModelName, read_checkpoint, read_path, write_path
from penstock.server.api.context import Context, RequestContext
from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.openapi import body_schema
from penstock.server.api.schemas.requests import CreateSamplerBody
from penstock.server.api.schemas.responses import (
    CreateSamplerResponse,
    FutureResponse,
    SamplerResponse,
)
from penstock.server.protocol import requests, results

router = guarded_router("sampling")


@router.post("/api/v1/create_sampling_session")
async def create_sampling_session(
    body: CreateSamplerBody, context: Context
) -> CreateSamplerResponse:
    """Create a sampling session. Without a session id (xorl), a path is its own name."""
    if body.session_id is None or body.sampling_session_seq_id is None:
        if body.model_path is None:
            raise ApiError("send session_id and sampling_session_seq_id, or model_path")
        return await _create_from_path(context, body.model_path, body.model_id or "default")
    path = None if body.model_path is None else read_path(body.model_path)
    if path is None and body.base_model is None:
        raise ApiError("send model_path or base_model, to say what is sampled from")
    operation = requests.CreateSampler(
        session=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        path=path,
    )
    result = await context.call(operation, results.SamplerResult)
    return CreateSamplerResponse(sampling_session_id=result.sampler, model_path=body.model_path)


@router.get("/api/v1/samplers/{sampler_id}")
async def sampler(sampler_id: ModelName, context: Context) -> SamplerResponse:
    """The model that a sampling session uses."""
    result = await context.call(requests.GetSampler(sampler=sampler_id), results.SamplerResult)
    path = None if result.path is None else write_path(*result.path.split("/", 1))
    return SamplerResponse(sampler_id=result.sampler, base_model=result.base_model, model_path=path)


@router.post("/api/v1/asample", openapi_extra=body_schema("AsampleBody"))
async def asample(request: Request, context: Context) -> FutureResponse:
    """Sample completions of a prompt."""
    async with context.decoding(request, "asample") as (decoded, operation):
        if decoded.base_model is not None:
            served = await context.call(requests.GetCapabilities(), results.ServedModel)
            if decoded.base_model != served.base_model:
                raise ApiError(
                    f"{decoded.base_model[:200]!r} is not served here; {served.base_model!r} is",
                    code="not_found",
                )
        result = await context.submit(
            "sample",
            operation,
            retry_key=decoded.retry_key,
            last_prompt_logprobs=decoded.last_prompt_logprobs,
        )
    result.sample_sequence_ids = [f"{result.request_id}:{index}" for index in range(decoded.count)]
    return result


async def _create_from_path(
    context: RequestContext, written: str, model: str
) -> CreateSamplerResponse:
    """A path that is its own name; a name alone is that of a checkpoint of `model` (xorl)."""
    if "/" in written.removeprefix("sampler_weights/"):
        path = read_path(written)
    else:
        path = f"{model}/{read_checkpoint(written, model, 'sampler_weights')}"
    checkpoint = (
        await context.call(requests.GetCheckpoint(path=path), results.CheckpointResult)
    ).checkpoint
    if checkpoint.kind != "sampler":
        raise ApiError(f"{written[:200]} is for resuming training; save weights for sampling")
    return CreateSamplerResponse(
        model_path=write_path(checkpoint.model, checkpoint.name),
        lora_name=f"{checkpoint.model}/{checkpoint.name}",
        message="sample from it with asample and this model_path",
    )
