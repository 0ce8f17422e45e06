"""The gate in front of the page: refuses requests that the rules refuse, and those without a
session, puts the page's headers on every answer, and ends what goes on when the page does."""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stratagem.client.dashboard.page_rules import HEADERS, PageAddress, why_not
from stratagem.client.dashboard.page_sessions import PageSessions

OPEN_PATHS = ("/", "/api/session")
OPEN_FOLDER = "/static/"


class PageGate:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, address: PageAddress, sessions: PageSessions) -> None:
        self._app, self._address, self._sessions = app, address, sessions
        self._answering: set[asyncio.Task[None]] = set()
        self._has_ended = False

    def end(self) -> None:
        """End all streams, and answer whoever still waits: a stream would never end by itself."""
        self._has_ended = True
        for task in self._answering:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        reason = why_not(self._address, scope["method"], headers)
        if reason:
            refusal = PlainTextResponse(reason, 403)
        elif not self._is_open(scope["path"]) and not self._knows(headers):
            text = "open this page by the address that it printed, or enter its token on it"
            refusal = PlainTextResponse(text, 401)
        else:
            await self._answer(scope, receive, send_with_headers)
            return
        await refusal(scope, receive, send_with_headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer, unless the page ends before it has."""
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None  # every request has one
        self._answering.add(task)
        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if not self._has_ended:
                raise
            task.uncancel()
            if has_begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await PlainTextResponse("the page has ended", 503)(scope, receive, send)
        finally:
            self._answering.discard(task)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)

    def _knows(self, headers: Headers) -> bool:
        return self._sessions.knows(headers.get("cookie", ""))
