"""Every error leaves as JSON in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from scheduler.errors import DeadlineExceeded, QueueFull, RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER = 1.0  # seconds; what a client is told when the engine is not ready
MAX_RETRY_AFTER = 600.0  # seconds; a longer forecast of the queue is no forecast


class MalformedBody(RequestError):
    """The body is not one JSON object."""

    def __init__(self, message: str):
        super().__init__(message, code="malformed_body")


class UnrecognizedArgument(RequestError):
    """A field that no version of this API knows."""

    def __init__(self, name: str):
        super().__init__(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )


class UnsupportedMediaType(RequestError):
    status = 415

    def __init__(self, content_type: str):
        super().__init__(
            f"The body must be application/json, got {content_type!r}. "
            "Send the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )


class ModelNotFound(RequestError):
    status = 404

    def __init__(self, model: str, served: str):
        super().__init__(
            f"The model {model!r} does not exist. This server serves {served!r}.",
            param="model",
            code="model_not_found",
        )


class NotReady(RequestError):
    """The engine takes no requests now: it is loading, draining, stuck or failed."""

    status = 503

    def __init__(self, state: str):
        super().__init__(f"The server is not ready: {state}.", code=state)
        self.retry_after = RETRY_AFTER


class EngineFault(RequestError):
    """The engine gave up on a request that it had accepted."""

    status = 500

    def __init__(self, message: str):
        super().__init__(message, code="engine_error")


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def error_response(error: RequestError) -> web.Response:
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull | NotReady):
        seconds = min(max(1.0, error.retry_after), MAX_RETRY_AFTER)  # 1 for NaN
        headers["Retry-After"] = str(math.ceil(seconds))
    if isinstance(error, DeadlineExceeded):
        headers["X-Should-Retry"] = "false"  # OpenAI's clients would ask, and wait, twice more
    body = error_body(error.message, error.status, error.param, error.code)
    return web.json_response(body, status=error.status, headers=headers)


def error_event(error: RequestError) -> bytes:
    """The same in the middle of a stream, as a server-sent event."""
    body = error_body(error.message, error.status, error.param, error.code)
    return b"data: " + json.dumps(body).encode() + b"\n\n"


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def _from_http(error: web.HTTPException, request: web.Request) -> web.Response:
    messages = {
        404: f"Unknown path: {request.method} {request.path}",
        405: f"Method {request.method} is not allowed for {request.path}",
        413: f"The request body is too large (limit {request.app[MAX_BODY_BYTES]} bytes).",
    }
    message = messages.get(error.status, error.reason)
    body = error_body(message, error.status, code=_HTTP_CODES.get(error.status))
    allow = error.headers.get("Allow")
    headers = {} if allow is None else {"Allow": allow}
    return web.json_response(body, status=error.status, headers=headers)


MAX_BODY_BYTES = web.AppKey("max_body_bytes", int)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _from_http(error, request)
    except (RequestPayloadError, HttpProcessingError) as error:
        return error_response(MalformedBody(f"The body cannot be read: {error}"))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        body = error_body("The server had an error while it processed the request.", 500)
        return web.json_response(body, status=500)
