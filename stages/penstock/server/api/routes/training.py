"""Training routes: models, forward and backward passes, optimizer steps. Requests that need workers
return a future."""

from fastapi import Request

from penstock.server.api.checkpoint_uris import model_name, read_path, write_path
from penstock.server.api.context import Context
from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.body_limit import PROTOBUF
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.openapi import body_schema
from penstock.server.api.schemas import requests as bodies
from penstock.server.api.schemas import responses
from penstock.server.api.wire.decode_params import (
    parse_adam_params,
    parse_lora,
    parse_metadata,
    parse_optimizer,
)
from penstock.server.protocol import requests, results

router = guarded_router("training")


def _name_in_session(body: bodies.CreateModelBody | bodies.LoadBody) -> str | None:
    """The name of a new model of a session and a number (SDK); None: it has neither."""
    if (body.session_id is None) != (body.model_seq_id is None):
        raise ApiError("send session_id and model_seq_id, both, or model_id instead of them")
    if body.session_id is None or body.model_seq_id is None:
        return None
    return model_name(body.session_id, body.model_seq_id)


@router.post("/api/v1/create_model")
async def create_model(body: bodies.CreateModelBody, context: Context) -> responses.FutureResponse:
    """Create a model for training."""
    model = _name_in_session(body)
    if model is not None and body.model_id is not None:
        raise ApiError("a model of a session and a number has its name from them: no model_id")
    model = model or body.model_id or "default"
    session = body.session_id or model
    operation = requests.CreateModel(
        session=session,
        model=model,
        base_model=body.base_model,
        lora=parse_lora(body.lora_config),
        optimizer_config=parse_optimizer(body.optimizer_config),
        user_metadata=parse_metadata(body.user_metadata, body.optimizer_config),
    )
    if body.session_id is None:
        # A model that a client names is its own session.
        await context.call(requests.CreateSession(session=session), results.CreateSessionResult)
    retry_key = f"model {model}" if body.session_id is not None else ""
    return await context.submit("create_model", operation, retry_key=retry_key)


@router.post("/api/v1/load_weights")
async def load_weights(body: bodies.LoadBody, context: Context) -> responses.FutureResponse:
    """Load a checkpoint: into an existing model, or into a new one of a session."""
    path = read_path(body.path)
    model = _name_in_session(body)
    if body.session_id is None or model is None:
        if body.base_model or body.user_metadata or body.optimizer_config:
            raise ApiError(
                "base_model, user_metadata and optimizer_config are of a new model; send"
                " session_id and model_seq_id with them"
            )
        operation = requests.LoadState(
            model=body.model_id or "default", path=path, optimizer=body.optimizer
        )
        return await context.submit("load_weights", operation, seq=body.seq_id, path=body.path)
    if body.model_id is not None or body.seq_id is not None:
        raise ApiError("a new model has neither model_id nor seq_id yet")
    operation = requests.CreateModel(
        session=body.session_id,
        model=model,
        base_model=body.base_model,
        lora=None,
        optimizer_config=parse_optimizer(body.optimizer_config),
        user_metadata=parse_metadata(body.user_metadata, body.optimizer_config),
        path=path,
        optimizer=body.optimizer,
    )
    return await context.submit(
        "load_weights", operation, path=body.path, retry_key=f"model {model}"
    )


@router.post("/api/v1/unload_model")
async def unload_model(body: bodies.ModelBody, context: Context) -> responses.FutureResponse:
    """Save a model and free its resources."""
    return await context.submit("unload_model", requests.UnloadModel(model=body.model_id))


@router.post("/api/v1/kill_session")
async def kill_session(
    body: bodies.KillSessionBody, context: Context
) -> responses.KillSessionResponse:
    """Unload a model and wait for it (xorl)."""
    operation = requests.UnloadModel(model=body.model_id, save=body.save_checkpoint)
    await context.call(operation, results.Done, by_workers=True)
    path = None
    if body.save_checkpoint:
        listed = await context.call(
            requests.ListCheckpoints(model=body.model_id), results.ListCheckpointsResult
        )
        training = [
            checkpoint for checkpoint in listed.checkpoints if checkpoint.kind == "training"
        ]
        last = max(training, key=lambda checkpoint: checkpoint.time, default=None)
        path = last and write_path(last.model, last.name)
    return responses.KillSessionResponse(
        success=True, message=f"{body.model_id} is unloaded", checkpoint_path=path
    )


@router.post("/api/v1/get_info")
async def get_info(body: bodies.ModelBody, context: Context) -> responses.InfoResponse:
    """Metadata of a model."""
    result = await context.call(requests.GetModel(model=body.model_id), results.ModelResult)
    data = responses.ModelData(
        arch=result.served.arch,
        model_name=result.served.base_model,
        tokenizer_id=result.served.tokenizer,
    )
    return responses.InfoResponse(
        model_id=result.info.model,
        is_lora=result.info.rank is not None,
        lora_rank=result.info.rank,
        model_name=result.served.base_model,
        model_data=data,
    )


@router.post("/api/v1/forward_backward", openapi_extra=body_schema("ForwardBackwardBody", PROTOBUF))
async def forward_backward(request: Request, context: Context) -> responses.FutureResponse:
    """A forward and backward pass, or only a forward pass if the SDK's message says so."""
    async with context.decoding(request, "forward_backward") as (decoded, operation):
        kind = "forward" if decoded.forward_only else "forward_backward"
        return await context.submit(kind, operation, model=decoded.model, seq=decoded.seq)


@router.post("/api/v1/forward", openapi_extra=body_schema("ForwardBody"))
async def forward(request: Request, context: Context) -> responses.FutureResponse:
    """A forward pass without gradients."""
    async with context.decoding(request, "forward") as (decoded, operation):
        return await context.submit("forward", operation, model=decoded.model, seq=decoded.seq)


@router.post("/api/v1/optim_step")
async def optim_step(body: bodies.StepBody, context: Context) -> responses.FutureResponse:
    """One optimizer step with the accumulated gradients."""
    metadata: dict[str, str] = {}
    if body.adam_params is None:
        result = await context.call(requests.GetModel(model=body.model_id), results.ModelResult)
        metadata = result.info.user_metadata
    sync = None
    if context.service.settings.sync_after_step:
        sync = requests.SyncWeights(
            model=body.model_id,
            quantization=context.service.quantization.get(context.owner),
            pools=("default", body.model_id),
        )
    operation = requests.OptimStep(
        model=body.model_id, adam=parse_adam_params(body, metadata), sync=sync
    )
    return await context.submit("optim_step", operation, seq=body.seq_id)


@router.post("/api/v1/abort_gradient_epoch")
async def abort_gradient_epoch(body: bodies.DropBody, context: Context) -> responses.FutureResponse:
    """Drop the gradients accumulated since the last step (xorl)."""
    operation = requests.ZeroGrad(model=body.model_id)
    return await context.submit("abort_gradient_epoch", operation, seq=body.seq_id)
