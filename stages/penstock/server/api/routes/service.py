"""Service routes: capabilities, health, sessions, client configuration."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.server.api.checkpoint_uris import SessionName
from penstock.server.api.context import AppState, Context
from penstock.server.api.errors import ApiError
from penstock.server.api.metrics import CONTENT_TYPE
from penstock.server.api.middleware.guarded_route import OpenRoute, guarded_router
from penstock.server.api.schemas import requests as bodies
from penstock.server.api.schemas import responses
from penstock.server.api.wire.decode_params import (
    DISPLAY_NAME,
    parse_lora,
    parse_metadata,
    user_metadata,
)
from penstock.server.protocol import requests, results

MAX_MODELS = 1000  # Maximum number of models in `session_info`; the newest are listed

router = guarded_router("service")
public_router = APIRouter(route_class=OpenRoute, tags=["health"])


@router.post("/api/v1/session_heartbeat")
async def session_heartbeat(
    body: bodies.HeartbeatBody, context: Context
) -> responses.HeartbeatResponse:
    """Heartbeat of a session."""
    await context.service.heartbeats.beat(context.owner, body.session_id)
    return responses.HeartbeatResponse(session_id=body.session_id)


@public_router.get("/")
@public_router.get("/api/v1/healthz")
async def healthz() -> responses.LiveResponse:
    """Liveness of the API process."""
    return responses.LiveResponse()


@public_router.get("/health", responses={503: {"model": responses.HealthResponse}})
@public_router.get("/api/v1/health", responses={503: {"model": responses.HealthResponse}})
async def health(request: Request) -> Response:
    """Readiness: 200 if the workers are ready, else 503."""
    service: AppState = request.app.state.service
    status = service.scheduler.status
    workers = status.workers if status else "unreachable"
    result = responses.HealthResponse(
        status="healthy" if workers == "ready" else workers,
        engine_running=status is not None,
        workers=workers,
        reason=status.reason if status else "",
        active_requests=service.futures.pending,
        total_requests=service.metrics.total,
    )
    return JSONResponse(result.model_dump(), 200 if result.status == "healthy" else 503)


@router.get("/metrics", response_class=Response)
async def metrics(context: Context) -> Response:
    """Prometheus metrics."""
    service = context.service
    text = service.metrics.write(
        pending=service.futures.pending,
        completed=len(service.futures),
        status=service.scheduler.status,
    )
    return Response(text, media_type=CONTENT_TYPE)


@router.post("/api/v1/client/config")
async def client_config(
    _body: bodies.ClientConfigBody, context: Context
) -> responses.ClientConfigResponse:
    """Client configuration of the SDK, the same for all SDK versions."""
    return responses.ClientConfigResponse(
        sample_max_concurrent_requests=context.service.settings.max_pending_requests
    )


@router.post("/api/v1/client/dynamic_config")
async def dynamic_config(_body: bodies.ClientConfigBody) -> responses.DynamicConfigResponse:
    """Client configuration that may change during a session."""
    return responses.DynamicConfigResponse()


@router.post("/api/v1/telemetry")
async def telemetry(request: Request) -> responses.TelemetryResponse:
    """SDK telemetry; it is read and dropped."""
    await request.body()
    return responses.TelemetryResponse()


@router.get("/api/v1/get_server_capabilities")
async def capabilities(context: Context) -> responses.CapabilitiesResponse:
    """The served model."""
    served = await context.call(requests.GetCapabilities(), results.ServedModel)
    model = responses.SupportedModel(
        model_name=served.base_model,
        max_context_length=served.max_context,
        trainable=True,
        sampleable=served.samples,
    )
    return responses.CapabilitiesResponse(supported_models=[model])


@router.post("/api/v1/create_session")
async def create_session(
    context: Context, body: bodies.CreateSessionBody | None = None
) -> responses.CreateSessionResponse:
    """Create a session."""
    body = body or bodies.CreateSessionBody()
    lora = parse_lora(body.lora_config)
    metadata = parse_metadata(body.user_metadata, None)
    if body.display_name is not None:
        metadata[DISPLAY_NAME] = body.display_name
    operation = requests.CreateSession(
        session=body.session_id, tags=tuple(body.tags), user_metadata=metadata
    )
    result = await context.call(operation, results.CreateSessionResult)
    context.service.heartbeats.begin(context.owner, result.session)
    if body.base_model is not None or body.lora_config is not None:
        model = requests.CreateModel(
            session=result.session, model=result.session, base_model=body.base_model, lora=lora
        )
        await context.call(model, results.CreateModelResult, by_workers=True)
    return responses.CreateSessionResponse(
        session_id=result.session, info_message=result.notice or None
    )


@router.get("/api/v1/sessions")
async def sessions(
    context: Context,
    limit: bodies.Limit = 20,
    offset: bodies.Offset = 0,
    _scope: bodies.Scope = "owned",
) -> responses.SessionsResponse:
    """A page of the owner's sessions."""
    result = await context.call(requests.ListSessions(), results.ListSessionsResult)
    return responses.SessionsResponse(sessions=list(result.sessions[offset : offset + limit]))


@router.get("/api/v1/sessions/{session_id}")
async def session(
    session_id: SessionName, context: Context, _scope: bodies.Scope = "owned"
) -> responses.SessionResponse:
    """The models and samplers of a session."""
    result = await context.call(requests.GetSession(session=session_id), results.SessionResult)
    return responses.SessionResponse(
        training_run_ids=list(result.models),
        sampler_ids=list(result.samplers),
        user_metadata=user_metadata(result.user_metadata),
        display_name=result.user_metadata.get(DISPLAY_NAME),
    )


@router.post("/api/v1/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: SessionName, context: Context, _body: bodies.FinishBody | None = None
) -> None:
    """Save and unload everything in a session, whatever reason the client gives."""
    context.service.heartbeats.forget(context.owner, session_id)
    try:
        await context.call(requests.EndSession(session=session_id), results.Done, by_workers=True)
    except ApiError as refusal:
        # It has already ended; a client that missed the response asks again.
        if refusal.code != "gone":
            raise


@router.get("/api/v1/session_info")
async def session_info(context: Context) -> responses.SessionInfoResponse:
    """Open sessions and models (xorl)."""
    result = await context.call(requests.ListSessions(), results.ListSessionsResult)
    runs = (
        await context.call(requests.ListModels(limit=MAX_MODELS), results.ListModelsResult)
    ).models
    loaded = [run for run in runs if run.is_open]
    return responses.SessionInfoResponse(
        registered_models=[run.model for run in runs],
        active_sessions=len(result.sessions),
        session_activity={run.model: run.last_request for run in loaded},
        idle_timeout_seconds=context.service.settings.idle_session_timeout,
        loaded_training_adapters=[run.model for run in loaded],
    )
