"""OpenAPI document: FastAPI's own, with additions that it cannot derive.

The additions are API keys, which are checked before FastAPI reads a body; errors, which have one
schema on all routes; and bodies with samples, which are decoded without FastAPI.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from penstock.server.api.middleware.body_limit import JSON
from penstock.server.api.schemas.requests import AsampleBody, ForwardBackwardBody, ForwardBody
from penstock.server.api.schemas.responses import ErrorResponse

SCHEMAS = "#/components/schemas/"

ERRORS = {
    400: "The request is invalid",
    401: "Unknown API key",
    404: "It does not exist, or belongs to another owner",
    408: "The body did not arrive in time",
    409: "It exists already, or was cancelled",
    410: "It has ended or expired",
    413: "The body is too large",
    415: "The body is of another type",
    421: "The host name of another machine, on a server without API keys",
    422: "The body does not fit its schema, or numbers are not finite",
    429: "Too many requests; Retry-After says when to try again",
    503: "The scheduler or the workers are not available",
    504: "Timeout",
    507: "Not enough storage",
}
"""Error responses of every route."""


KEYS = {
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "bearer": {"type": "http", "scheme": "bearer"},
}
"""The two ways to send an API key."""


def body_schema(schema: str, *media_types: str) -> dict[str, Any]:
    """The request body of a route that decodes it itself: JSON of this schema, or bytes of the
    media types `media_types`."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {JSON: {"schema": {"$ref": SCHEMAS + schema}}} | dict.fromkeys(media_types, binary)
    return {"requestBody": {"required": True, "content": content}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document, built once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema["components"]["schemas"]
        for model in (ErrorResponse, ForwardBackwardBody, ForwardBody, AsampleBody):
            model_schema = model.model_json_schema(ref_template=SCHEMAS + "{model}")
            for name, part in model_schema.pop("$defs", {}).items():
                schemas.setdefault(name, part)
            schemas[model.__name__] = model_schema
        schema["components"]["securitySchemes"] = KEYS
        schema["security"] = [{name: []} for name in KEYS]
        body = {"schema": {"$ref": f"{SCHEMAS}{ErrorResponse.__name__}"}}
        for methods in schema["paths"].values():
            for operation in methods.values():
                answers = operation["responses"]
                if "health" in operation["tags"]:
                    operation["security"] = []
                # FastAPI's schema of validation errors is not the one used here.
                answers.pop("422", None)
                for status, description in ERRORS.items():
                    error = {"description": description, "content": {JSON: body}}
                    answers.setdefault(str(status), error)
        app.openapi_schema = schema
    return app.openapi_schema
