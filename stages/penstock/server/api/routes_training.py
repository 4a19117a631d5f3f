"""Routes of training: models, passes and steps. What takes workers is answered with a future."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from penstock.server.api.answers import FutureTold, InfoTold, KillSessionTold, ModelData
from penstock.server.api.bodies import PROTOBUF, BoundedRequest
from penstock.server.api.data import data_of_json
from penstock.server.api.desk import AtDesk, Desk
from penstock.server.api.losses import choose, choose_foreign
from penstock.server.api.paths import model_of, read_path, scheme_of, write_path
from penstock.server.api.proto import pass_of, read_pass
from penstock.server.api.refusals import Refusal
from penstock.server.api.routing import guarded_router
from penstock.server.api.schemas import (
    CreateModelBody,
    DropBody,
    ForwardBackwardBody,
    ForwardBody,
    KillSessionBody,
    LoadBody,
    ModelBody,
    SamplesBody,
    StepBody,
)
from penstock.server.api.wishes import adam_of, lora_of, metadata_of, optimizer_of
from penstock.server.protocol import results, works

MANY_BYTES = 1 << 18
"""Of a body, whose samples take some milliseconds to read."""

router = guarded_router("training")


@router.post("/api/v1/create_model")
async def create_model(body: CreateModelBody, desk: AtDesk) -> FutureTold:
    """Train anew."""
    if (body.session_id is None) != (body.model_seq_id is None):
        raise Refusal("send session_id and model_seq_id, both, or model_id instead of them")
    if body.session_id is not None and body.model_seq_id is not None:
        if body.model_id is not None:
            raise Refusal("a model of a session and a number has its name from them: no model_id")
        session, model = body.session_id, model_of(body.session_id, body.model_seq_id)
    else:
        session = model = body.model_id or "default"
    work = works.CreateModel(
        session=session,
        model=model,
        base_model=body.base_model,
        lora=lora_of(body.lora_config),
        optimizer_config=optimizer_of(body.optimizer_config),
        user_metadata=metadata_of(body.user_metadata, body.optimizer_config),
    )
    if body.session_id is None:
        # A model that a client names is a session of its own.
        await desk.call(works.CreateSession(session=session), results.SessionMade)
    again = f"model {model}" if body.session_id is not None else ""
    return FutureTold(**await desk.submit("create_model", work, again=again))


@router.post("/api/v1/load_weights")
async def load_weights(body: LoadBody, desk: AtDesk) -> FutureTold:
    """Go on from a checkpoint: in a model that is there, or in a new one of a session."""
    path = read_path(body.path)
    if body.session_id is None or body.model_seq_id is None:
        if body.session_id is not None or body.model_seq_id is not None:
            raise Refusal("send session_id and model_seq_id, both, or model_id instead of them")
        if body.base_model or body.user_metadata or body.optimizer_config:
            raise Refusal(
                "base_model, user_metadata and optimizer_config are of a new model; send"
                " session_id and model_seq_id with them"
            )
        work = works.LoadState(
            model=body.model_id or "default", path=path, optimizer=body.optimizer
        )
        told = await desk.submit("load_weights", work, seq=body.seq_id, path=body.path)
        return FutureTold(**told)
    if body.model_id is not None or body.seq_id is not None:
        raise Refusal("a new model has neither model_id nor seq_id yet")
    model = model_of(body.session_id, body.model_seq_id)
    work = works.CreateModel(
        session=body.session_id,
        model=model,
        base_model=body.base_model,
        lora=None,
        optimizer_config=optimizer_of(body.optimizer_config),
        user_metadata=metadata_of(body.user_metadata, body.optimizer_config),
        path=path,
        optimizer=body.optimizer,
    )
    told = await desk.submit("load_weights", work, path=body.path, again=f"model {model}")
    return FutureTold(**told)


@router.post("/api/v1/unload_model")
async def unload_model(body: ModelBody, desk: AtDesk) -> FutureTold:
    """Save a model and free what it takes."""
    return FutureTold(**await desk.submit("unload_model", works.UnloadModel(model=body.model_id)))


@router.post("/api/v1/kill_session")
async def kill_session(body: KillSessionBody, desk: AtDesk) -> KillSessionTold:
    """Free what a model takes, and wait for it (xorl)."""
    work = works.UnloadModel(model=body.model_id, save=body.save_checkpoint)
    await desk.call(work, results.Done, by_workers=True)
    path = None
    if body.save_checkpoint:
        kept = await desk.call(works.ListCheckpoints(model=body.model_id), results.CheckpointsTold)
        training = [one for one in kept.checkpoints if one.kind == "training"]
        last = max(training, key=lambda one: one.time, default=None)
        path = last and write_path(last.model, last.name)
    return KillSessionTold(
        success=True, message=f"{body.model_id} is unloaded", checkpoint_path=path
    )


@router.post("/api/v1/get_info")
async def get_info(body: ModelBody, desk: AtDesk) -> InfoTold:
    """What a model is."""
    told = await desk.call(works.ModelOf(model=body.model_id), results.ModelTold)
    data = ModelData(
        arch=told.served.arch,
        model_name=told.served.base_model,
        tokenizer_id=told.served.tokenizer,
    )
    return InfoTold(
        model_id=told.run.model,
        is_lora=told.run.rank is not None,
        lora_rank=told.run.rank,
        model_name=told.served.base_model,
        model_data=data,
    )


@router.post(
    "/api/v1/forward_backward",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/ForwardBackwardBody"}
                },
                PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
)
async def forward_backward(request: Request, desk: AtDesk) -> FutureTold:
    """A pass with gradients, or without them where the SDK's message says so."""
    assert isinstance(request, BoundedRequest)
    if request.kind == PROTOBUF:
        return FutureTold(**await _proto_pass(request, desk))
    try:
        body = ForwardBackwardBody.model_validate(await request.json())
    except ValidationError as error:
        raise RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        ) from error
    work = await _read(request, partial(_pass, body.model_id, body.forward_backward_input))
    return FutureTold(**await desk.submit("forward_backward", work, seq=body.seq_id))


@router.post("/api/v1/forward")
async def forward(body: ForwardBody, request: Request, desk: AtDesk) -> FutureTold:
    """A pass without gradients."""
    read = partial(_pass, body.model_id, body.forward_input, forward_only=True)
    work = await _read(request, read)
    return FutureTold(**await desk.submit("forward", work, seq=body.seq_id))


@router.post("/api/v1/optim_step")
async def optim_step(body: StepBody, desk: AtDesk) -> FutureTold:
    """One step of the optimizer along the gathered gradients."""
    metadata: dict[str, str] = {}
    if body.adam_params is None:
        told = await desk.call(works.ModelOf(model=body.model_id), results.ModelTold)
        metadata = told.run.user_metadata
    work = works.Step(model=body.model_id, adam=adam_of(body, metadata))
    return FutureTold(**await desk.submit("optim_step", work, seq=body.seq_id))


@router.post("/api/v1/abort_gradient_epoch")
async def abort_gradient_epoch(body: DropBody, desk: AtDesk) -> FutureTold:
    """Drop the gradients that were gathered since the last step (xorl)."""
    work = works.DropGradients(model=body.model_id)
    return FutureTold(**await desk.submit("abort_gradient_epoch", work, seq=body.seq_id))


async def _proto_pass(request: BoundedRequest, desk: Desk) -> dict[str, Any]:
    message = read_pass(await request.body())
    # What is refused from here on takes its number along.
    request.parsed = {"model_id": message.model_id, "seq_id": message.seq_id}
    if message.seq_id < 1:
        raise Refusal(f"seq_id is {message.seq_id}, and the first is 1")
    work = await _read(request, partial(pass_of, message))
    kind = "forward" if message.forward_only else "forward_backward"
    return await desk.submit(kind, work, seq=message.seq_id)


async def _read(request: Request, read: Callable[[], works.Pass]) -> works.Pass:
    """The pass that a body asks for. While many samples are read, others are served."""
    if len(await request.body()) < MANY_BYTES:
        return read()
    return await asyncio.to_thread(read)


def _pass(model: str, body: SamplesBody, *, forward_only: bool = False) -> works.Pass:
    """A pass of JSON. xorl's clients know their models by names of their own, their losses by
    theirs, and gather gradients of the sum that a step divides by the number of tokens."""
    ours = scheme_of(model) == "tinker"
    params = body.loss_fn_params or {}
    chosen = choose(body.loss_fn, params) if ours else choose_foreign(body.loss_fn, params)
    return works.Pass(
        model=model,
        data=data_of_json(
            [(sample.model_input, sample.loss_fn_inputs) for sample in body.data], chosen.loss
        ),
        loss=chosen.loss,
        params=chosen.params,
        forward_only=forward_only,
        per="sum" if ours else "token",
    )
