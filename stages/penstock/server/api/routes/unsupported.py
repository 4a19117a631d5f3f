"""Unsupported routes of the Tinker and xorl APIs. Each is rejected by name with a reason."""

from fastapi import Request

from penstock.server.api.errors import ApiError
from penstock.server.api.middleware.guarded_route import guarded_router

NO_ACCOUNTS = "there are no accounts, projects or bills here; keys are in the server's settings"
NO_LOSSES = "losses are not uploaded here: forward_backward_custom computes them at the client"
NO_COPIES = "checkpoints are files of this server: a new model starts from one with load_weights"
NO_DOWNLOADS = "checkpoints are folders under the server's output_dir; copy them from there"
NO_SLEEP = "the workers keep their memory while they live; unload models to free it"
NO_POLLS = "futures are waited for one by one, with retrieve_future"
NO_TRACES = "sessions are neither traced nor searched here; training_runs lists what was trained"
_ONE = "/api/v1/training_runs/{model_id}/checkpoints/{checkpoint:path}"
ABSENT = {
    "/api/v1/auth/token": ("POST", NO_ACCOUNTS),
    "/api/v1/auth/apikey/me": ("GET DELETE", NO_ACCOUNTS),
    "/api/v1/audit": ("GET", NO_ACCOUNTS),
    "/api/v1/billing/usage/events": ("GET", NO_ACCOUNTS),
    "/api/v1/billing/usage/checkpoints/current": ("GET", NO_ACCOUNTS),
    "/api/v1/sessions/{session_id}/project": ("PUT", NO_ACCOUNTS),
    "/api/v1/sessions/{session_id}/trace_export": ("GET", NO_TRACES),
    "/api/v1/sessions/search": ("POST", NO_TRACES),
    "/api/v1/create_custom_loss": ("POST", NO_LOSSES),
    "/api/v1/copy_weights": ("POST", NO_COPIES),
    "/api/v1/save_weights_external": ("POST", NO_DOWNLOADS),
    _ONE + "/external_weights_urls": ("GET", NO_DOWNLOADS),
    _ONE + "/archive": ("GET", NO_DOWNLOADS),
    "/api/v1/retrieve_futures": ("POST", NO_POLLS),
    "/api/v1/join_sampling_session": ("POST", NO_POLLS),
    "/sleep": ("POST", NO_SLEEP),
    "/wake_up": ("POST", NO_SLEEP),
}
"""Their HTTP methods and the reasons."""

router = guarded_router("not offered")


def _refuse(path: str, methods: str, why: str) -> None:
    async def absent(request: Request) -> None:
        raise ApiError(f"{request.url.path[:200]} is not offered here: {why}", code="not_found")

    router.add_api_route(path, absent, methods=methods.split(), include_in_schema=False)


for _path, _methods_and_reason in ABSENT.items():
    _refuse(_path, *_methods_and_reason)
