"""The routes of the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from vlora import __version__, paths
from vlora.errors import ServerError, nearest, shown
from vlora.gateway.answers import CompletionWriter
from vlora.gateway.backend import Backend, Piece, Question, wait_for_first_answer
from vlora.gateway.bodies import MAX_JSON_BYTES, Bodies, Held, too_much_json
from vlora.gateway.door import (
    AccessLog,
    App,
    Door,
    GatewayMetrics,
    KeyFile,
    RateLimit,
    Receive,
    Visit,
)
from vlora.gateway.errors import ApiError, error_response
from vlora.gateway.media import MediaLoader
from vlora.gateway.options import GatewayOptions, check_base_name
from vlora.gateway.requests import Ask, of_tenant, read_body, read_chat, read_completion
from vlora.net import get, is_local
from vlora.static_pages import StaticPages

Result = TypeVar("Result")


class Disconnected(Exception):
    """Raised when the client has closed its connection."""


async def connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`, or cancel it and raise Disconnected if the client disconnects.
    The request's body must have been received already.
    """
    gone = asyncio.ensure_future(_until_gone(receive))
    # Read from the connection before `work` begins, which is expensive to begin and to cancel.
    for _ in range(2):
        await asyncio.sleep(0)
    task = asyncio.ensure_future(work)
    try:
        if not gone.done():
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for waiting in (task, gone):
            if not waiting.done():
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


PAGE = Path(__file__).parent / "static"
EXAMPLES = paths.root() / "tools" / "demo" / "samples"  # Images of the demo, for the gallery.

METRICS_SECONDS = 5.0  # Time limit in seconds for reading the server's metrics.
# Seconds for which they are kept. A server refreshes its own once a second, and reading those of 64
# adapters takes the gateway 1 ms.
METRICS_AGE_SECONDS = 1.0

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Pieces = AsyncGenerator[Piece, None]

# Paths that the error for an unknown path may suggest.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


def _as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Gateway:
    """Request handlers of one application.

    fail: stops the gateway, because it cannot serve this server.
    """

    def __init__(self, options: GatewayOptions, fail: Callable[[ServerError], None]) -> None:
        self.options = options
        self._fail = fail
        self.metrics = GatewayMetrics()
        self._created = int(time.time())
        # The server's last description, the entries made of it, and those of the last list.
        self._described: tuple[Mapping[str, Any], Mapping[str, bytes]] = {}, {}
        self._listed: tuple[Mapping[str, bytes], bytes] = {}, b""
        # Time and result of the last reading of the server's metrics.
        self._server_metrics = -math.inf, b""
        self._reading_metrics = asyncio.Lock()

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Create the clients of the server and of image hosts, and close them at shutdown."""
        self._backend = Backend(self.options.grpc, self.options.answer_seconds, self.options.tls)
        self._media = MediaLoader(self.options)
        self._bodies = Bodies(self.options)
        gc.collect()
        gc.freeze()  # Exclude the objects of imported libraries from later garbage collections.
        waiting = asyncio.create_task(self._check_server())
        yield
        waiting.cancel()
        await asyncio.wait([waiting])
        self._bodies.close()
        await self._media.close()
        await self._backend.close()

    async def _check_server(self) -> None:
        say = partial(print, file=sys.stderr, flush=True)
        description = await wait_for_first_answer(self._backend, self.options.grpc, say)
        name, names = self.options.base_name, {*description.get("broken", ())}
        names |= {adapter["name"] for adapter in description.get("adapters", ())}
        try:
            check_base_name(name, name in names, "--base-name")
        except ServerError as error:
            self._fail(error)

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, read_chat)

    async def completion(self, request: Request) -> Response:
        return await self._complete(request, read_completion)

    async def models(self) -> Response:
        """Return the list of the base model and all adapters that can be served at present."""
        entries = await self._entries()
        if self._listed[0] is not entries:
            data = b",".join(entries.values())
            self._listed = entries, b'{"object":"list","data":[' + data + b"]}"
        return Response(self._listed[1], media_type="application/json")

    async def model(self, name: str) -> Response:
        if entry := (await self._entries()).get(name):
            return Response(entry, media_type="application/json")
        reason = f"the model {shown(name)} does not exist; GET /v1/models lists the names"
        raise ApiError("NOT_FOUND", reason, "model")

    async def health(self) -> Response:
        """Return a response that says whether the V-LoRA server answers."""
        await self._backend.check()
        return JSONResponse({"status": "ok"})

    async def metrics_page(self) -> Response:
        """Return the gateway's metrics, followed by the server's."""
        url = self.options.metrics_url
        servers = b"" if url is None else await self._read_server_metrics(url)
        page = self.metrics.text() + servers
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _read_server_metrics(self, url: str) -> bytes:
        """Return the server's metrics, b"" if it does not answer. Calls at the same time share one
        reading.
        """
        async with self._reading_metrics:
            now = asyncio.get_running_loop().time
            if now() > self._server_metrics[0] + METRICS_AGE_SECONDS:
                page = b""
                direct = is_local(url.partition("://")[2].partition("/")[0].rpartition(":")[0])
                with suppress(OSError):
                    page = await asyncio.to_thread(get, url, METRICS_SECONDS, direct)
                self._server_metrics = now(), page
            return self._server_metrics[1]

    async def _entries(self) -> Mapping[str, bytes]:
        """Return the JSON of each model by name; the same object until a model changes."""
        description = await self._backend.describe()
        if self._described[0] is not description:
            # There may be 100,000 adapters, which must not stop other requests.
            self._described = description, await asyncio.to_thread(self._describe, description)
        return self._described[1]

    def _describe(self, description: Mapping[str, Any]) -> dict[str, bytes]:
        base = {
            "id": self.options.base_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vlora",
            "parent": None,
            "max_model_len": description["max_model_len"],
            "tasks": description["tasks"],
        }
        # A server of an earlier version does not send the labels.
        labels = description.get("task_labels", {})
        entries = {base["id"]: _as_json({**base, "task_labels": labels})}
        for adapter in description["adapters"]:
            own = {key: value for key, value in adapter.items() if key != "name"}
            # An adapter of the base model's name may have been added after the start.
            entry = {**base, "id": adapter["name"], "parent": base["id"], **own}
            entries.setdefault(adapter["name"], _as_json(entry))
        return entries

    async def _complete(self, request: Request, read: Callable[[dict[str, Any]], Ask]) -> Response:
        visit: Visit = request.state.visit
        ask = None
        try:
            with self._bodies.holding(visit.tenant) as held:
                # No variable here keeps the body, so its memory is free once it was passed on.
                ask = await self._bodies.parse(
                    await self._bodies.receive(request, held), partial(_read, read), visit.tenant
                )
                visit.model = ask.model
                files = await self._load(ask, held)
                ask = replace(ask, conversation=ask.conversation.without_urls())
                return await self._answer(request, visit, ask, files, held)
        except ApiError as error:
            if error.code == "NOT_FOUND":
                error.message += f"; the base model is {self.options.base_name!r}"
            elif ask is not None and error.param is None:
                error.param = ask.conversation.place_of(error.message)
            raise
        except (ClientDisconnect, Disconnected):
            self.metrics.disconnects.inc()
            return Response(status_code=499)
        except asyncio.CancelledError:
            raise _stopped() from None

    async def _load(self, ask: Ask, held: Held) -> list[list[bytes]]:
        """Return the files of a request's images and videos."""
        media = ask.conversation.media
        files = await self._media.load([*chain(*media)], self._bodies, held)
        rest = iter(files)
        return [[*islice(rest, len(one))] for one in media]

    async def _answer(
        self, request: Request, visit: Visit, ask: Ask, files: list[list[bytes]], held: Held
    ) -> Response:
        id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{visit.id}"
        writer = CompletionWriter(ask, id)
        sampling = ask.sampling
        if visit.isolated:
            sampling = of_tenant(sampling, visit.tenant)
        if ask.model != self.options.base_name:
            sampling = {**sampling, "lora_name": ask.model}
        pieces = self._backend.ask(
            Question(
                id,
                ask.conversation.text,
                ask.task,
                files.pop(0),
                files.pop(0),
                sampling,
                ask.stream,
                ask.logprobs,
                ask.has_messages,
            ),
            held.release,
        )
        if ask.stream:
            # The response begins when the first piece has arrived. An error before that still sets
            # the HTTP status.
            try:
                first = await connected(request.receive, anext(pieces))
            except ApiError as error:
                if error.code != "CANCELLED" or not sampling.get("supersede"):
                    raise
                # The client itself superseded the request. A browser would report an error status
                # in its console, so the error is sent as an event.
                visit.code = error.code
                return _Events(_only(_event(error)), pieces, self.metrics)
            return _Events(self._events(writer, first, pieces, visit), pieces, self.metrics)
        answer = writer.whole(await connected(request.receive, _collected(pieces)))
        _note_answer(visit, writer)
        return JSONResponse(answer)

    async def _events(
        self, writer: CompletionWriter, first: Piece, pieces: Pieces, visit: Visit
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield writer.events(first)
            async for piece in pieces:
                yield writer.events(piece)
        except ApiError as error:
            visit.code = error.code
            yield _event(error)
        finally:
            _note_answer(visit, writer)


class _Events(Response):
    """A stream of server-sent events. Starlette's `StreamingResponse` takes more time for each.
    `pieces`, from which they are made, is closed even if the client disconnects before the first.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], pieces: Pieces, metrics: GatewayMetrics
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_HEADERS)
        self._events = events
        self._pieces = pieces
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._pieces), aclosing(self._events):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            try:
                await connected(receive, self._send(send))
            except Disconnected:
                self._metrics.disconnects.inc()
            except asyncio.CancelledError:
                scope["state"]["visit"].code = (error := _stopped()).code
                await send({"type": "http.response.body", "body": _event(error)})

    async def _send(self, send: Any) -> None:
        async for event in self._events:
            if event:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _read(read: Callable[[dict[str, Any]], Ask], body: bytearray) -> Ask:
    ask = read(read_body(body))
    # A text that looks like a data URL has not been counted yet.
    if len(ask.conversation.text) + len(str(ask.sampling)) > MAX_JSON_BYTES:
        raise too_much_json()
    return ask


def _event(error: ApiError) -> bytes:
    return b"data: %b\n\n" % error.as_json()


def _stopped() -> ApiError:
    """Return the error for a request that is cancelled because the gateway stops."""
    return ApiError("UNAVAILABLE", "the gateway has stopped before the end of the answer")


async def _only(event: bytes) -> AsyncGenerator[bytes, None]:
    yield event


def _note_answer(visit: Visit, writer: CompletionWriter) -> None:
    visit.prompt_tokens = writer.prompt_tokens
    visit.completion_tokens = writer.completion_tokens
    visit.finish_reason = writer.finish_reason


async def _collected(pieces: Pieces) -> list[Piece]:
    return [piece async for piece in pieces]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.visit.code = error.code
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "INVALID_ARG")
    path = f"{request.method} {request.url.path}"
    outside = error.status_code == 404 and not request.url.path.startswith(("/v1/", "/playground/"))
    hint = "; the paths of the API begin with /v1/" if outside else ""
    if error.status_code == 405:
        hint = f"; use {(error.headers or {}).get('Allow', 'another method')}"
    elif error.status_code == 404 and not outside:
        hint = nearest(request.url.path, PATHS)
    return error_response(ApiError(code, f"{path}: {error.detail}{hint}"))


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(ApiError("INTERNAL", "the gateway failed; see its log for details"))


def make_app(options: GatewayOptions, fail: Callable[[ServerError], None]) -> App:
    """Return the application. Raises ServerError if the file of API keys cannot be used."""
    gateway = Gateway(options, fail)
    app = FastAPI(
        title="V-LoRA gateway",
        version=__version__,
        lifespan=gateway.running,
        docs_url=None,  # These pages load scripts from elsewhere.
        redoc_url=None,
    )
    routes: dict[str, tuple[str, Callable[..., Coroutine[Any, Any, Response]]]] = {
        "/v1/chat/completions": ("POST", gateway.chat),
        "/v1/completions": ("POST", gateway.completion),
        "/v1/models": ("GET", gateway.models),
        "/v1/models/{name:path}": ("GET", gateway.model),
        "/health": ("GET", gateway.health),
        "/metrics": ("GET", gateway.metrics_page),
    }
    for path, (method, endpoint) in routes.items():
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.mount("/playground/examples", StaticPages(directory=EXAMPLES, check_dir=False))
    app.mount("/playground", StaticPages(directory=PAGE, html=True))
    app.add_api_route("/", _to_playground, include_in_schema=False, response_model=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients send a dozen of their own.
        )
    return Door(
        app,
        None if options.keys is None else KeyFile(options.keys),
        None if options.requests_per_minute is None else RateLimit(options.requests_per_minute),
        frozenset(options.cors_origins),
        gateway.metrics,
        AccessLog(sys.stdout, gateway.metrics.lost_lines),
    )


async def _to_playground() -> Response:
    return RedirectResponse("/playground/")
