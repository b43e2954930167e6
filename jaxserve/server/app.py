"""The routes: from an HTTP request to the engine's stream, and from deltas to the socket.

A request goes: body -> protocol.parse_* -> token ids -> client.submit -> one of `answer_whole` and
`answer_stream`. Whoever leaves early, by whatever road, has the stream aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jaxserve.server.client import EngineClient, State, Stream
from jaxserve.server.errors import (
    MAX_BODY_BYTES,
    ModelNotFound,
    NotReady,
    UnsupportedMediaType,
    errors_as_json,
)
from jaxserve.server.fields import parse_object
from jaxserve.server.merge import merge
from jaxserve.server.metrics import CONTENT_TYPE, make_registry, render
from jaxserve.server.options import read_caller
from jaxserve.server.protocol import (
    Common,
    Prompt,
    check_request_id,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from jaxserve.server.respond import Limits, answer_stream, answer_whole
from jaxserve.server.shapes import (
    AnswerWriter,
    ChatShape,
    ChunkWriter,
    CompletionShape,
    Head,
    Shape,
)
from scheduler.errors import InvalidParameter

MAX_BODY = 16 * 2**20  # bytes of a request body
INLINE_CHARS = 4096  # texts up to this length are encoded on the event loop (well under 1 ms)


@dataclass(slots=True)
class Front:
    """What the handlers share. `draining` is set by a signal, before the engine knows of it."""

    client: EngineClient
    slow_reader_timeout: float  # seconds
    keepalive: float  # seconds
    started: int  # seconds since 1970
    draining: bool = False

    def state(self) -> State:
        state = self.client.state()
        return "draining" if self.draining and state == "ready" else state

    def require_ready(self) -> None:
        state = self.state()
        if state != "ready":
            raise NotReady(state)

    def require_model(self, model: str | None) -> None:
        """No name means the model that is served."""
        if model is not None and model != self.client.model_name:
            raise ModelNotFound(model, self.client.model_name)


FRONT = web.AppKey("front", Front)
CALLER_ID = web.RequestKey("caller_id", str)


def create_app(
    client: EngineClient,
    *,
    slow_reader_timeout: float = 60.0,
    keepalive: float = 5.0,
    max_body_bytes: int = MAX_BODY,
) -> web.Application:
    """slow_reader_timeout: seconds that one write may wait for a client that does not read.
    keepalive: seconds after which a silent stream gets a comment (math.inf: never).

    Serve it with `handler_cancellation=True` (lifecycle.py does), or leaving clients go unnoticed.
    """
    assert keepalive > 0, "a comment after every 0 seconds"
    app = web.Application(middlewares=[errors_as_json], client_max_size=max_body_bytes)
    app[FRONT] = Front(client, slow_reader_timeout, keepalive, int(time.time()))
    app[MAX_BODY_BYTES] = max_body_bytes
    registry = make_registry(client.stats)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=render(registry), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", get_model)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.on_response_prepare.append(_send_request_id)
    return app


async def health(request: web.Request) -> web.Response:
    state = request.app[FRONT].state()
    return web.json_response({"status": state}, status=200 if state == "ready" else 503)


def _model(front: Front) -> dict[str, object]:
    return {
        "id": front.client.model_name,
        "object": "model",
        "created": front.started,
        "owned_by": "jaxserve",
        "max_model_len": front.client.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    front.require_ready()
    return web.json_response({"object": "list", "data": [_model(front)]})


async def get_model(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    front.require_ready()
    front.require_model(request.match_info["model"])
    return web.json_response(_model(front))


async def completions(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await _read(request, front)
    arrival = time.monotonic()
    asked = parse_completion(body, front.client.vocab_size, read_caller(request))
    front.require_model(asked.common.model)
    prompts = await _prompt_ids(front.client, asked.prompts)
    return await _answer(request, front, CompletionShape(), asked.common, prompts, arrival)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await _read(request, front)
    arrival = time.monotonic()
    asked = parse_chat(body, read_caller(request))
    front.require_model(asked.common.model)
    ids = await _chat_ids(front.client, asked.messages)
    return await _answer(request, front, ChatShape(), asked.common, [ids], arrival)


async def tokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    body = await _read(request, front)
    model, prompt, messages = parse_tokenize(body)
    front.require_model(model)
    if prompt is None:
        ids = await _chat_ids(front.client, messages)
    else:
        [ids] = await _prompt_ids(front.client, [prompt])
    return web.json_response(
        {"tokens": ids, "count": len(ids), "max_model_len": front.client.max_model_len}
    )


async def detokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    body = await _read(request, front)
    model, token_ids = parse_detokenize(body, front.client.vocab_size)
    front.require_model(model)
    text = await _off_loop(lambda: front.client.decode(token_ids), len(token_ids))
    return web.json_response({"prompt": text})


async def _read(request: web.Request, front: Front) -> dict[str, Any]:
    """The body, once it is worth reading: a server that is not ready says so first."""
    front.require_ready()
    caller_id = request.headers.get("X-Request-Id")
    if caller_id is not None:
        request[CALLER_ID] = check_request_id(caller_id, "X-Request-Id")
    media = request.content_type
    if "Content-Type" in request.headers and not media.endswith(("/json", "+json")):
        raise UnsupportedMediaType(media)
    return parse_object(await request.read())


async def _off_loop[T](work: Callable[[], T], chars: int) -> T:
    """Do it here if that is quick, else on a worker thread."""
    return work() if chars <= INLINE_CHARS else await asyncio.to_thread(work)


async def _prompt_ids(client: EngineClient, prompts: list[Prompt]) -> list[list[int]]:
    chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    all_ids = await _off_loop(
        lambda: [client.encode(p) if isinstance(p, str) else p for p in prompts], chars
    )
    if not all(all_ids):
        raise InvalidParameter("prompt", "must not be empty: it has no tokens")
    return all_ids


async def _chat_ids(client: EngineClient, messages: list[dict[str, Any]]) -> list[int]:
    # what is around a short message costs as much as the message
    chars = sum(len(message["content"]) + 32 for message in messages)
    ids = await _off_loop(lambda: client.render_chat(messages), chars)
    if not ids:
        raise InvalidParameter("messages", "must not be empty: they have no tokens")
    return ids


async def _answer(
    request: web.Request,
    front: Front,
    shape: Shape,
    common: Common,
    prompts: list[list[int]],
    arrival: float,
) -> web.StreamResponse:
    caller_id = common.request_id or request.get(CALLER_ID)
    unique = uuid.uuid4().hex
    request_id = shape.id_prefix + (f"{caller_id}-{unique[:8]}" if caller_id else unique)
    request[CALLER_ID] = caller_id or request_id
    n = common.params.n
    head = Head(
        id=request_id,
        model=front.client.model_name,
        created=int(time.time()),
        prompt_tokens=sum(len(ids) for ids in prompts),
        num_choices=n * len(prompts),
        logprobs=common.params.logprobs,
    )
    limits = Limits(common.options.timeout, front.slow_reader_timeout, front.keepalive)
    stream = _submit(front, request_id, common, prompts, arrival)
    try:
        if not common.stream:
            return await answer_whole(request, stream, AnswerWriter(shape, head), limits)
        writer = ChunkWriter(shape, head, common.include_usage, common.continuous_usage)
        return await answer_stream(request, stream, writer, limits)
    finally:
        stream.abort()


def _submit(
    front: Front, request_id: str, common: Common, prompts: list[list[int]], arrival: float
) -> Stream:
    front.require_ready()  # again: reading and encoding may have taken long
    requests = [(f"{request_id}-{i}", ids) for i, ids in enumerate(prompts)]
    if len(prompts) == 1:
        requests = [(request_id, prompts[0])]
    streams = front.client.submit(requests, common.params, common.options, arrival=arrival)
    return merge(streams, common.params.n)


async def _send_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.get(CALLER_ID) or uuid.uuid4().hex
