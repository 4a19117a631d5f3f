"""Service routes: capabilities, health, sessions, client configuration."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.server.api.checkpoint_uris import SessionName
from penstock.server.api.context import AppState, AtDesk
from penstock.server.api.errors import ApiError
from penstock.server.api.metrics import CONTENT_TYPE
from penstock.server.api.middleware.guarded_route import OpenRoute, guarded_router
from penstock.server.api.schemas.requests import (
    ClientConfigBody,
    CreateSessionBody,
    FinishBody,
    HeartbeatBody,
    Limit,
    Offset,
    Scope,
)
from penstock.server.api.schemas.responses import (
    CapabilitiesResponse,
    ClientConfigResponse,
    CreateSessionResponse,
    DynamicConfigResponse,
    HealthResponse,
    HeartbeatResponse,
    LiveResponse,
    SessionInfoResponse,
    SessionResponse,
    SessionsResponse,
    SupportedModel,
    TelemetryResponse,
)
from penstock.server.api.wire.decode_params import (
    DISPLAY_NAME,
    parse_lora,
    parse_metadata,
    user_metadata,
)
from penstock.server.protocol import requests, results

MAX_MODELS = 1000
"""Maximum number of models in `session_info`; the newest are listed."""

router = guarded_router("service")
everybody = APIRouter(route_class=OpenRoute, tags=["health"])


@router.post("/api/v1/session_heartbeat")
async def session_heartbeat(body: HeartbeatBody, desk: AtDesk) -> HeartbeatResponse:
    """Heartbeat of a session."""
    await desk.service.pulse.beat(desk.owner, body.session_id)
    return HeartbeatResponse(session_id=body.session_id)


@everybody.get("/")
@everybody.get("/api/v1/healthz")
async def healthz() -> LiveResponse:
    """Liveness of the API process."""
    return LiveResponse()


@everybody.get("/health", responses={503: {"model": HealthResponse}})
@everybody.get("/api/v1/health", responses={503: {"model": HealthResponse}})
async def health(request: Request) -> Response:
    """Readiness: 200 if the workers are ready, else 503."""
    service: AppState = request.app.state.service
    status = service.link.status
    workers = status.workers if status else "unreachable"
    told = HealthResponse(
        status="healthy" if workers == "ready" else workers,
        engine_running=status is not None,
        workers=workers,
        reason=status.reason if status else "",
        active_requests=service.futures.pending,
        total_requests=service.metrics.total,
    )
    return JSONResponse(told.model_dump(), 200 if told.status == "healthy" else 503)


@router.get("/metrics", response_class=Response)
async def metrics(desk: AtDesk) -> Response:
    """Prometheus metrics."""
    service = desk.service
    text = service.metrics.write(
        pending=service.futures.pending, kept=len(service.futures), status=service.link.status
    )
    return Response(text, media_type=CONTENT_TYPE)


@router.post("/api/v1/client/config")
async def client_config(_body: ClientConfigBody, desk: AtDesk) -> ClientConfigResponse:
    """Client configuration of the SDK, the same for all SDK versions."""
    return ClientConfigResponse(
        sample_max_concurrent_requests=desk.service.settings.max_pending_requests
    )


@router.post("/api/v1/client/dynamic_config")
async def dynamic_config(_body: ClientConfigBody) -> DynamicConfigResponse:
    """Client configuration that may change during a session."""
    return DynamicConfigResponse()


@router.post("/api/v1/telemetry")
async def telemetry(request: Request) -> TelemetryResponse:
    """SDK telemetry; it is read and dropped."""
    await request.body()
    return TelemetryResponse()


@router.get("/api/v1/get_server_capabilities")
async def capabilities(desk: AtDesk) -> CapabilitiesResponse:
    """The served model."""
    served = await desk.call(requests.Capabilities(), results.Served)
    model = SupportedModel(
        model_name=served.base_model,
        max_context_length=served.max_context,
        trainable=True,
        sampleable=served.samples,
    )
    return CapabilitiesResponse(supported_models=[model])


@router.post("/api/v1/create_session")
async def create_session(
    desk: AtDesk, body: CreateSessionBody | None = None
) -> CreateSessionResponse:
    """Create a session."""
    body = body or CreateSessionBody()
    lora = parse_lora(body.lora_config)
    metadata = parse_metadata(body.user_metadata, None)
    if body.display_name is not None:
        metadata[DISPLAY_NAME] = body.display_name
    work = requests.CreateSession(
        session=body.session_id, tags=tuple(body.tags), user_metadata=metadata
    )
    made = await desk.call(work, results.SessionMade)
    desk.service.pulse.begin(desk.owner, made.session)
    if body.base_model is not None or body.lora_config is not None:
        model = requests.CreateModel(
            session=made.session,
            model=made.session,
            base_model=body.base_model,
            lora=lora,
        )
        await desk.call(model, results.ModelMade, by_workers=True)
    return CreateSessionResponse(session_id=made.session, info_message=made.notice or None)


@router.get("/api/v1/sessions")
async def sessions(
    desk: AtDesk, limit: Limit = 20, offset: Offset = 0, _scope: Scope = "owned"
) -> SessionsResponse:
    """A page of the owner's sessions."""
    told = await desk.call(requests.ListSessions(), results.Sessions)
    return SessionsResponse(sessions=list(told.sessions[offset : offset + limit]))


@router.get("/api/v1/sessions/{session_id}")
async def session(
    session_id: SessionName, desk: AtDesk, _scope: Scope = "owned"
) -> SessionResponse:
    """The models and samplers of a session."""
    told = await desk.call(requests.SessionOf(session=session_id), results.SessionResult)
    return SessionResponse(
        training_run_ids=list(told.models),
        sampler_ids=list(told.samplers),
        user_metadata=user_metadata(told.user_metadata),
        display_name=told.user_metadata.get(DISPLAY_NAME),
    )


@router.post("/api/v1/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: SessionName, desk: AtDesk, _body: FinishBody | None = None) -> None:
    """Save and unload everything in a session, whatever reason the client gives."""
    desk.service.pulse.forget(desk.owner, session_id)
    try:
        await desk.call(requests.EndSession(session=session_id), results.Done, by_workers=True)
    except ApiError as refusal:
        # It has already ended; a client that missed the response asks again.
        if refusal.code != "gone":
            raise


@router.get("/api/v1/session_info")
async def session_info(desk: AtDesk) -> SessionInfoResponse:
    """Open sessions and models (xorl)."""
    told = await desk.call(requests.ListSessions(), results.Sessions)
    runs = (await desk.call(requests.ListRuns(limit=MAX_MODELS), results.Runs)).runs
    loaded = [run for run in runs if run.is_open]
    return SessionInfoResponse(
        registered_models=[run.model for run in runs],
        active_sessions=len(told.sessions),
        session_activity={run.model: run.last_request for run in loaded},
        idle_timeout_seconds=desk.service.settings.idle_session_timeout,
        loaded_training_adapters=[run.model for run in loaded],
    )
