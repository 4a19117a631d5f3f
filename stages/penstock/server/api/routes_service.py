"""Routes of the service: what it offers, how it is, sessions, and how clients are to behave."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.server.api.answers import (
    CapabilitiesTold,
    ClientConfigTold,
    CreateSessionTold,
    DynamicConfigTold,
    HealthTold,
    HeartbeatTold,
    LiveTold,
    SessionInfoTold,
    SessionsTold,
    SessionTold,
    SupportedModel,
    TelemetryTold,
)
from penstock.server.api.desk import AtDesk, Service
from penstock.server.api.metrics import CONTENT_TYPE
from penstock.server.api.pages import Limit, Offset, Scope
from penstock.server.api.paths import SessionName
from penstock.server.api.refusals import Refusal
from penstock.server.api.routing import OpenRoute, guarded_router
from penstock.server.api.schemas import (
    ClientConfigBody,
    CreateSessionBody,
    FinishBody,
    HeartbeatBody,
)
from penstock.server.api.wishes import lora_of, metadata_of
from penstock.server.protocol import results, works

MAX_SESSIONS = 100
"""That `session_info` looks into."""

router = guarded_router("service")
everybody = APIRouter(route_class=OpenRoute, tags=["health"])


@router.post("/api/v1/session_heartbeat")
async def session_heartbeat(body: HeartbeatBody, desk: AtDesk) -> HeartbeatTold:
    """The client of a session lives."""
    try:
        await desk.call(works.Heartbeat(session=body.session_id), results.Done)
    except Refusal as refusal:
        if refusal.code != "not_found":
            raise
        # The SDK stops beating at 410.
        raise Refusal(refusal.error, code="gone") from refusal
    return HeartbeatTold(session_id=body.session_id)


@everybody.get("/")
@everybody.get("/api/v1/healthz")
async def healthz() -> LiveTold:
    """Whether this process answers."""
    return LiveTold()


@everybody.get("/health", responses={503: {"model": HealthTold}})
@everybody.get("/api/v1/health", responses={503: {"model": HealthTold}})
async def health(request: Request) -> Response:
    """Whether work can be done: 200 while the workers are ready, else 503."""
    service: Service = request.app.state.service
    status = service.link.status
    workers = status.workers if status else "unreachable"
    told = HealthTold(
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
    """Counts and times, as Prometheus reads them."""
    service = desk.service
    text = service.metrics.write(
        pending=service.futures.pending, kept=len(service.futures), status=service.link.status
    )
    return Response(text, media_type=CONTENT_TYPE)


@router.post("/api/v1/client/config")
async def client_config(_body: ClientConfigBody, desk: AtDesk) -> ClientConfigTold:
    """How the SDK is to behave here: whichever version it says it is."""
    return ClientConfigTold(
        sample_max_concurrent_requests=desk.service.settings.max_pending_requests
    )


@router.post("/api/v1/client/dynamic_config")
async def dynamic_config(_body: ClientConfigBody) -> DynamicConfigTold:
    """What of that may change while a client lives."""
    return DynamicConfigTold()


@router.post("/api/v1/telemetry")
async def telemetry(request: Request) -> TelemetryTold:
    """What the SDK tells of itself: it is read and dropped."""
    await request.body()
    return TelemetryTold()


@router.get("/api/v1/get_server_capabilities")
async def capabilities(desk: AtDesk) -> CapabilitiesTold:
    """The model that is served."""
    served = await desk.call(works.Capabilities(), results.Served)
    model = SupportedModel(
        model_name=served.base_model,
        max_context_length=served.max_context,
        trainable=True,
        sampleable=served.samples,
    )
    return CapabilitiesTold(supported_models=[model])


@router.post("/api/v1/create_session")
async def create_session(desk: AtDesk, body: CreateSessionBody | None = None) -> CreateSessionTold:
    """Begin a session."""
    body = body or CreateSessionBody()
    metadata = metadata_of(body.user_metadata, None)
    if body.display_name is not None:
        metadata["display_name"] = body.display_name
    work = works.CreateSession(
        session=body.session_id, tags=tuple(body.tags), user_metadata=metadata
    )
    made = await desk.call(work, results.SessionMade)
    if body.base_model is not None or body.lora_config is not None:
        model = works.CreateModel(
            session=made.session,
            model=made.session,
            base_model=body.base_model,
            lora=lora_of(body.lora_config),
        )
        await desk.call(model, results.ModelMade, by_workers=True)
    return CreateSessionTold(session_id=made.session, info_message=made.notice or None)


@router.get("/api/v1/sessions")
async def sessions(
    desk: AtDesk, limit: Limit = 20, offset: Offset = 0, _scope: Scope = "owned"
) -> SessionsTold:
    """A page of the owner's sessions."""
    told = await desk.call(works.ListSessions(), results.Sessions)
    return SessionsTold(sessions=list(told.sessions[offset : offset + limit]))


@router.get("/api/v1/sessions/{session_id}")
async def session(session_id: SessionName, desk: AtDesk, _scope: Scope = "owned") -> SessionTold:
    """What belongs to a session."""
    told = await desk.call(works.SessionOf(session=session_id), results.SessionTold)
    return SessionTold(training_run_ids=list(told.models), sampler_ids=list(told.samplers))


@router.post("/api/v1/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: SessionName, desk: AtDesk, _body: FinishBody | None = None) -> None:
    """Save and unload what belongs to a session, for whatever reason its client gives."""
    await desk.call(works.EndSession(session=session_id), results.Done, by_workers=True)


@router.get("/api/v1/session_info")
async def session_info(desk: AtDesk) -> SessionInfoTold:
    """What is open (xorl)."""
    names = (await desk.call(works.ListSessions(), results.Sessions)).sessions[:MAX_SESSIONS]
    models: list[str] = []
    for name in names:
        told = await desk.call(works.SessionOf(session=name), results.SessionTold)
        models.extend(told.models)
    runs: Any = (await desk.call(works.ListRuns(limit=MAX_SESSIONS), results.Runs)).runs
    return SessionInfoTold(
        registered_models=models,
        active_sessions=len(names),
        session_activity={run.model: run.last_request for run in runs if run.model in models},
        idle_timeout_seconds=desk.service.settings.idle_session_timeout,
        loaded_training_adapters=models,
    )
