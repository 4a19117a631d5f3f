"""Checkpoint routes: training and sampler checkpoints, and the models that they belong to."""

from collections.abc import Sequence
from datetime import UTC, datetime

from penstock.server.api.checkpoint_uris import (
    TRAINED,
    ModelName,
    read_checkpoint,
    read_path,
    session_name,
    write_path,
)
from penstock.server.api.context import Context, RequestContext
from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.schemas import requests as bodies
from penstock.server.api.schemas import responses
from penstock.server.api.wire.decode_params import user_metadata
from penstock.server.protocol import requests, results
from penstock.server.protocol.types import Checkpoint, ModelInfo

router = guarded_router("weights")

RUN_CHECKPOINTS = "/api/v1/training_runs/{model_id}/checkpoints"
ONE_CHECKPOINT = RUN_CHECKPOINTS + "/{checkpoint:path}"


@router.post("/api/v1/save_weights")
async def save_weights(body: bodies.SaveBody, context: Context) -> responses.FutureResponse:
    """Save a checkpoint for resuming training."""
    operation = requests.SaveState(
        model=body.model_id,
        name=body.path,
        overwrite=body.overwrite,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata or {},
    )
    return await context.submit("save_weights", operation, seq=body.seq_id)


@router.post("/api/v1/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: bodies.SaveSamplerBody, context: Context
) -> responses.FutureResponse:
    """Save weights for sampling: under a name, or as a sampler of the model's session."""
    name = body.path if body.path is not None else body.name
    if None not in (body.path, body.name):
        raise ApiError("send path (SDK) or name (xorl), one of them")
    number = body.sampling_session_seq_id
    if number is not None and TRAINED not in body.model_id:
        raise ApiError(f"{body.model_id} is of no session of the SDK's; give its weights a name")
    operation = requests.SaveSamplerWeights(
        model=body.model_id,
        name=name,
        session=None if number is None else session_name(body.model_id),
        number=number,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata or {},
        keep=name is not None or number is None,
    )
    return await context.submit("save_weights_for_sampler", operation, seq=body.seq_id)


@router.post("/api/v1/weights_info")
async def weights_info(body: bodies.WeightsInfoBody, context: Context) -> responses.WeightsResponse:
    """Metadata of a checkpoint."""
    written = body.tinker_path if body.tinker_path is not None else body.xorl_path
    if written is None or None not in (body.tinker_path, body.xorl_path):
        raise ApiError("send tinker_path or xorl_path, one of them")
    result = await context.call(
        requests.GetCheckpoint(path=read_path(written)), results.CheckpointResult
    )
    lora = result.lora
    if lora is None:
        return responses.WeightsResponse(base_model=result.base_model, is_lora=False)
    alpha = lora.alpha
    return responses.WeightsResponse(
        base_model=result.base_model,
        is_lora=True,
        lora_rank=lora.rank,
        lora_config=None
        if alpha is None
        else responses.LoraResponse(lora_rank=lora.rank, lora_alpha=alpha),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


@router.get("/api/v1/training_runs")
async def training_runs(
    context: Context,
    limit: bodies.Limit = 20,
    offset: bodies.Offset = 0,
    _scope: bodies.Scope = "owned",
) -> responses.RunsResponse:
    """The owner's models, newest first."""
    result = await context.call(
        requests.ListModels(limit=limit, offset=offset), results.ListModelsResult
    )
    return responses.RunsResponse(
        training_runs=[_to_run(run, context.owner) for run in result.models],
        cursor=responses.CursorResponse(offset=offset, limit=limit, total_count=result.total),
    )


@router.get("/api/v1/training_runs/{model_id}")
async def training_run(
    model_id: ModelName, context: Context, _scope: bodies.Scope = "owned"
) -> responses.RunResponse:
    """One model."""
    result = await context.call(requests.GetModel(model=model_id), results.ModelResult)
    return _to_run(result.info, context.owner)


@router.get("/api/v1/checkpoints")
async def checkpoints(
    context: Context, limit: bodies.Limit = 100, offset: bodies.Offset = 0
) -> responses.CheckpointsResponse:
    """A page of the owner's checkpoints, newest first."""
    result = (
        await context.call(requests.ListCheckpoints(), results.ListCheckpointsResult)
    ).checkpoints
    cursor = responses.CursorResponse(offset=offset, limit=limit, total_count=len(result))
    return responses.CheckpointsResponse(
        checkpoints=_to_response(result)[offset : offset + limit], cursor=cursor
    )


@router.post("/api/v1/list_checkpoints")
async def list_checkpoints(
    body: bodies.CheckpointsBody, context: Context
) -> responses.CheckpointsResponse:
    """All checkpoints of one model, newest first (xorl)."""
    return await _list_checkpoints_of(context, body.model_id)


@router.post("/api/v1/delete_checkpoint")
async def delete_checkpoint(
    body: bodies.DeleteCheckpointBody, context: Context
) -> responses.DeletedResponse:
    """Delete a checkpoint of a model (xorl)."""
    name = read_checkpoint(body.checkpoint_id, body.model_id)
    await context.call(requests.DeleteCheckpoint(model=body.model_id, name=name), results.Done)
    return responses.DeletedResponse(success=True, deleted_path=write_path(body.model_id, name))


@router.get(RUN_CHECKPOINTS)
async def run_checkpoints(model_id: ModelName, context: Context) -> responses.CheckpointsResponse:
    """All checkpoints of one model, newest first."""
    return await _list_checkpoints_of(context, model_id)


@router.post(ONE_CHECKPOINT + "/publish", status_code=204)
async def publish(model_id: ModelName, checkpoint: str, context: Context) -> None:
    """Make a checkpoint readable by other owners."""
    await _update_checkpoint(context, model_id, checkpoint, public=True)


@router.delete(ONE_CHECKPOINT + "/publish", status_code=204)
async def unpublish(model_id: ModelName, checkpoint: str, context: Context) -> None:
    """Make a checkpoint private again."""
    await _update_checkpoint(context, model_id, checkpoint, public=False)


@router.put(ONE_CHECKPOINT + "/ttl", status_code=204)
async def ttl(model_id: ModelName, checkpoint: str, body: bodies.TtlBody, context: Context) -> None:
    """Change the expiry time of a checkpoint."""
    await _update_checkpoint(context, model_id, checkpoint, ttl_seconds=body.ttl_seconds)


# After `/publish`: a parameter of type `path` would take that for part of a checkpoint's name.
@router.delete(ONE_CHECKPOINT, status_code=204)
async def delete(model_id: ModelName, checkpoint: str, context: Context) -> None:
    """Delete a checkpoint."""
    name = read_checkpoint(checkpoint, model_id)
    await context.call(requests.DeleteCheckpoint(model=model_id, name=name), results.Done)


async def _list_checkpoints_of(
    context: RequestContext, model: str
) -> responses.CheckpointsResponse:
    result = await context.call(
        requests.ListCheckpoints(model=model), results.ListCheckpointsResult
    )
    return responses.CheckpointsResponse(checkpoints=_to_response(result.checkpoints))


async def _update_checkpoint(
    context: RequestContext,
    model: str,
    checkpoint: str,
    *,
    ttl_seconds: float | None = None,
    public: bool | None = None,
) -> None:
    name = read_checkpoint(checkpoint, model)
    operation = requests.UpdateCheckpoint(
        model=model, name=name, ttl_seconds=ttl_seconds, public=public
    )
    await context.call(operation, results.Done)


def _to_response(checkpoints: Sequence[Checkpoint]) -> list[responses.CheckpointResponse]:
    newest = sorted(checkpoints, key=lambda checkpoint: checkpoint.time, reverse=True)
    return list(map(_to_checkpoint, newest))


def _to_checkpoint(checkpoint: Checkpoint) -> responses.CheckpointResponse:
    return responses.CheckpointResponse(
        checkpoint_id=checkpoint.name,
        checkpoint_type=checkpoint.kind,
        time=_format_time(checkpoint.time),
        path=write_path(checkpoint.model, checkpoint.name),
        tinker_path=f"tinker://{checkpoint.model}/{checkpoint.name}",
        size_bytes=checkpoint.size,
        public=checkpoint.public,
        expires_at=None if checkpoint.expires is None else _format_time(checkpoint.expires),
        user_metadata=checkpoint.user_metadata,
    )


def _to_run(run: ModelInfo, owner: str) -> responses.RunResponse:
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return responses.RunResponse(
        training_run_id=run.model,
        base_model=run.base_model,
        model_owner=owner,
        is_lora=run.rank is not None,
        corrupted=run.corrupted,
        lora_rank=run.rank,
        last_request_time=_format_time(run.last_request),
        last_checkpoint=last and _to_checkpoint(last),
        last_sampler_checkpoint=sampler and _to_checkpoint(sampler),
        user_metadata=user_metadata(run.user_metadata),
    )


def _format_time(seconds: float) -> str:
    """ISO 8601 of seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
