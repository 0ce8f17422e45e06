"""The gate in front of the page: refuses requests that the rules refuse, and those without a
session, and puts the page's headers on every answer."""

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
            refusal = PlainTextResponse("open this page by the address that it printed", 401)
        else:
            await self._app(scope, receive, send_with_headers)
            return
        await refusal(scope, receive, send_with_headers)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)

    def _knows(self, headers: Headers) -> bool:
        return self._sessions.knows(headers.get("cookie", ""))
