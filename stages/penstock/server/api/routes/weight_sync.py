"""Weight sync routes: inference servers that receive weights (xorl API)."""

from penstock.server.api.context import Context, RequestContext
from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.guarded_route import guarded_router
from penstock.server.api.schemas import requests as bodies
from penstock.server.api.schemas import responses
from penstock.server.api.wire.decode_params import parse_quantization
from penstock.server.protocol import requests, results, types

router = guarded_router("inference servers")


@router.post("/add_inference_endpoint")
async def add_inference_endpoint(
    body: bodies.EndpointBody, context: Context
) -> responses.EndpointResponse:
    """Register an inference server for weight sync."""
    if body.worker_port not in (None, body.port):
        raise ApiError(
            f"worker_port is {body.worker_port}, and weights are announced at port alone"
        )
    endpoint = types.Endpoint(
        host=body.host, port=body.port, world_size=body.world_size, pool=body.pool
    )
    operation = requests.AddEndpoint(
        endpoint=endpoint,
        is_sized="world_size" in body.model_fields_set,
        api_key=None if body.api_key is None else types.Secret(text=body.api_key),
    )
    endpoints = (await context.call(operation, results.EndpointsResult)).endpoints
    added = next(
        endpoint
        for endpoint in endpoints
        if (endpoint.host, endpoint.port) == (body.host, body.port)
    )
    is_synced, message = False, None
    if body.sync_weights:
        sync = bodies.SyncBody(
            master_address=body.master_address or "",
            master_port=body.master_port,
            group_name=body.group_name,
            buffer_size_mb=body.buffer_size_mb,
            pools=[body.pool],
        )
        try:
            message = (await _sync(context, sync)).message
            is_synced = True
        except ApiError as refusal:
            # The server stays registered, as the response says.
            message = refusal.error
    return responses.EndpointResponse(
        success=True,
        message=f"{body.host}:{body.port} is sent weights from now on",
        endpoint=responses.Endpoint.model_validate(added),
        weights_synced=is_synced,
        sync_message=message,
    )


@router.post("/remove_inference_endpoint")
async def remove_inference_endpoint(
    body: bodies.RemoveEndpointBody, context: Context
) -> responses.RemovedResponse:
    """Unregister an inference server."""
    await context.call(
        requests.RemoveEndpoint(host=body.host, port=body.port), results.EndpointsResult
    )
    return responses.RemovedResponse(success=True, message=f"{body.host}:{body.port} is removed")


@router.get("/list_inference_endpoints")
async def list_inference_endpoints(context: Context) -> responses.EndpointsResponse:
    """The registered inference servers."""
    result = await context.call(requests.ListEndpoints(), results.EndpointsResult)
    endpoints = [responses.Endpoint.model_validate(endpoint) for endpoint in result.endpoints]
    return responses.EndpointsResponse(endpoints=endpoints, count=len(endpoints))


@router.post("/sync_inference_weights", include_in_schema=False)
@router.post("/api/v1/sync_inference_weights")
async def sync_inference_weights(
    body: bodies.SyncBody, context: Context
) -> responses.SyncedResponse:
    """Send a model's weights to inference servers and wait for completion."""
    return await _sync(context, body)


@router.post("/api/v1/set_sync_quantization")
async def set_sync_quantization(
    body: bodies.QuantizationBody, context: Context
) -> responses.QuantizationResponse:
    """Set the default quantization of weight sync until this process ends."""
    context.service.quantization[context.owner] = parse_quantization(body.quantization)
    return responses.QuantizationResponse(
        quantization=body.quantization, message="it holds until the server is started again"
    )


async def _sync(context: RequestContext, body: bodies.SyncBody) -> responses.SyncedResponse:
    if body.cache_invalidation_mode == "none" and body.flush_cache:
        raise ApiError("flush_cache is true, and cache_invalidation_mode is none: send one of them")
    flush = body.flush_cache or body.cache_invalidation_mode == "flush"
    quantization = parse_quantization(body.quantization)
    if quantization is None:
        quantization = context.service.quantization.get(context.owner)
    fields = types.common_fields(body, requests.SyncWeights) | {
        "flush_cache": flush,
        "quantization": quantization,
        "pools": tuple(body.pools or ()),
    }
    operation = requests.SyncWeights(model=body.model_id or "default", **fields)
    done = await context.call(operation, results.SyncWeightsResult, by_workers=True)
    return responses.SyncedResponse(
        success=True,
        message=f"{done.num_parameters} parameters are sent to {len(done.endpoints)} servers",
        transfer_time=done.seconds,
        total_bytes=done.total_bytes,
        num_parameters=done.num_parameters,
        num_buckets=done.num_buckets,
        cache_invalidation_mode=body.cache_invalidation_mode,
        flush_cache=flush,
        endpoints_synced=[
            responses.EndpointSynced.model_validate(endpoint) for endpoint in done.endpoints
        ],
    )
