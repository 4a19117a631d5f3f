"""Training routes: models, forward and backward passes, optimizer steps. Requests that need workers
return a future."""

from fastapi import Request

from penstock.server.api.checkpoint_uris import model_name, read_path, write_path
from penstock.server.api.context import AtDesk
from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.body_limit import PROTOBUF
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.openapi import body_schema
from penstock.server.api.schemas.requests import (
    CreateModelBody,
    DropBody,
    KillSessionBody,
    LoadBody,
    ModelBody,
    StepBody,
)
from penstock.server.api.schemas.responses import (
    FutureResponse,
    InfoResponse,
    KillSessionResponse,
    ModelData,
)
from penstock.server.api.wire.decode_params import (
    parse_adam_params,
    parse_lora,
    parse_metadata,
    parse_optimizer,
)
from penstock.server.protocol import requests, results

router = guarded_router("training")


@router.post("/api/v1/create_model")
async def create_model(body: CreateModelBody, desk: AtDesk) -> FutureResponse:
    """Create a model for training."""
    if (body.session_id is None) != (body.model_seq_id is None):
        raise ApiError("send session_id and model_seq_id, both, or model_id instead of them")
    if body.session_id is not None and body.model_seq_id is not None:
        if body.model_id is not None:
            raise ApiError("a model of a session and a number has its name from them: no model_id")
        session, model = body.session_id, model_name(body.session_id, body.model_seq_id)
    else:
        session = model = body.model_id or "default"
    work = requests.CreateModel(
        session=session,
        model=model,
        base_model=body.base_model,
        lora=parse_lora(body.lora_config),
        optimizer_config=parse_optimizer(body.optimizer_config),
        user_metadata=parse_metadata(body.user_metadata, body.optimizer_config),
    )
    if body.session_id is None:
        # A model that a client names is its own session.
        await desk.call(requests.CreateSession(session=session), results.SessionMade)
    again = f"model {model}" if body.session_id is not None else ""
    return FutureResponse(**await desk.submit("create_model", work, again=again))


@router.post("/api/v1/load_weights")
async def load_weights(body: LoadBody, desk: AtDesk) -> FutureResponse:
    """Load a checkpoint: into an existing model, or into a new one of a session."""
    path = read_path(body.path)
    if body.session_id is None or body.model_seq_id is None:
        if body.session_id is not None or body.model_seq_id is not None:
            raise ApiError("send session_id and model_seq_id, both, or model_id instead of them")
        if body.base_model or body.user_metadata or body.optimizer_config:
            raise ApiError(
                "base_model, user_metadata and optimizer_config are of a new model; send"
                " session_id and model_seq_id with them"
            )
        work = requests.LoadState(
            model=body.model_id or "default", path=path, optimizer=body.optimizer
        )
        told = await desk.submit("load_weights", work, seq=body.seq_id, path=body.path)
        return FutureResponse(**told)
    if body.model_id is not None or body.seq_id is not None:
        raise ApiError("a new model has neither model_id nor seq_id yet")
    model = model_name(body.session_id, body.model_seq_id)
    work = requests.CreateModel(
        session=body.session_id,
        model=model,
        base_model=body.base_model,
        lora=None,
        optimizer_config=parse_optimizer(body.optimizer_config),
        user_metadata=parse_metadata(body.user_metadata, body.optimizer_config),
        path=path,
        optimizer=body.optimizer,
    )
    told = await desk.submit("load_weights", work, path=body.path, again=f"model {model}")
    return FutureResponse(**told)


@router.post("/api/v1/unload_model")
async def unload_model(body: ModelBody, desk: AtDesk) -> FutureResponse:
    """Save a model and free its resources."""
    return FutureResponse(
        **await desk.submit("unload_model", requests.UnloadModel(model=body.model_id))
    )


@router.post("/api/v1/kill_session")
async def kill_session(body: KillSessionBody, desk: AtDesk) -> KillSessionResponse:
    """Unload a model and wait for it (xorl)."""
    work = requests.UnloadModel(model=body.model_id, save=body.save_checkpoint)
    await desk.call(work, results.Done, by_workers=True)
    path = None
    if body.save_checkpoint:
        kept = await desk.call(
            requests.ListCheckpoints(model=body.model_id), results.CheckpointsResult
        )
        training = [one for one in kept.checkpoints if one.kind == "training"]
        last = max(training, key=lambda one: one.time, default=None)
        path = last and write_path(last.model, last.name)
    return KillSessionResponse(
        success=True, message=f"{body.model_id} is unloaded", checkpoint_path=path
    )


@router.post("/api/v1/get_info")
async def get_info(body: ModelBody, desk: AtDesk) -> InfoResponse:
    """Metadata of a model."""
    told = await desk.call(requests.ModelOf(model=body.model_id), results.ModelResult)
    data = ModelData(
        arch=told.served.arch,
        model_name=told.served.base_model,
        tokenizer_id=told.served.tokenizer,
    )
    return InfoResponse(
        model_id=told.run.model,
        is_lora=told.run.rank is not None,
        lora_rank=told.run.rank,
        model_name=told.served.base_model,
        model_data=data,
    )


@router.post("/api/v1/forward_backward", openapi_extra=body_schema("ForwardBackwardBody", PROTOBUF))
async def forward_backward(request: Request, desk: AtDesk) -> FutureResponse:
    """A forward and backward pass, or only a forward pass if the SDK's message says so."""
    async with desk.decoding(request, "forward_backward") as (said, work):
        kind = "forward" if said.forward_only else "forward_backward"
        return FutureResponse(**await desk.submit(kind, work, model=said.model, seq=said.seq))


@router.post("/api/v1/forward", openapi_extra=body_schema("ForwardBody"))
async def forward(request: Request, desk: AtDesk) -> FutureResponse:
    """A forward pass without gradients."""
    async with desk.decoding(request, "forward") as (said, work):
        return FutureResponse(**await desk.submit("forward", work, model=said.model, seq=said.seq))


@router.post("/api/v1/optim_step")
async def optim_step(body: StepBody, desk: AtDesk) -> FutureResponse:
    """One optimizer step with the accumulated gradients."""
    metadata: dict[str, str] = {}
    if body.adam_params is None:
        told = await desk.call(requests.ModelOf(model=body.model_id), results.ModelResult)
        metadata = told.run.user_metadata
    sync = None
    if desk.service.settings.sync_after_step:
        sync = requests.SyncWeights(
            model=body.model_id,
            quantization=desk.service.quantization.get(desk.owner),
            pools=("default", body.model_id),
        )
    work = requests.Step(model=body.model_id, adam=parse_adam_params(body, metadata), sync=sync)
    return FutureResponse(**await desk.submit("optim_step", work, seq=body.seq_id))


@router.post("/api/v1/abort_gradient_epoch")
async def abort_gradient_epoch(body: DropBody, desk: AtDesk) -> FutureResponse:
    """Drop the gradients accumulated since the last step (xorl)."""
    work = requests.DropGradients(model=body.model_id)
    return FutureResponse(**await desk.submit("abort_gradient_epoch", work, seq=body.seq_id))
