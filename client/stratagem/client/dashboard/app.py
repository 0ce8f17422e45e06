"""Serve the dashboard as an ASGI application; each route makes one or two calls of the client."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from stratagem.client.course.members import time_text
from stratagem.client.course.views import Event
from stratagem.client.dashboard.books import RunBooks
from stratagem.client.dashboard.gate import PageAddress, PageGate, PageSessions
from stratagem.client.dashboard.stream import TabResponse, TabStream
from stratagem.client.dashboard.values import WHOLE, CurveView, as_json
from stratagem.client.dashboard.watches import CoordinatorWatch, RunsWatch
from stratagem.client.pictures.svg import stylesheet
from stratagem.client.report.comparison import (
    check_compared,
    job_differences,
    overlay_panels,
)
from stratagem.client.report.pages import page
from stratagem.client.report.panels import Panel, curve_panels
from stratagem.client.report.run import ReportedRun
from stratagem.client.report.run_panels import strategy_panels, time_line_panel
from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    StratagemError,
    UnauthenticatedError,
    told,
)

# ---- Routes ----

STATIC: Final = Path(__file__).parent / "static"
FILES: Final = frozenset(path.name for path in STATIC.iterdir())
MIN_WIDTH: Final = 280
MAX_WIDTH: Final = 1600
MAX_EVENTS: Final = 500
_WITH_STYLES: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
}
"""The content security policy of a file with its own styles and no script."""
MAX_LINES: Final = 1000
MAX_BODY_BYTES: Final = 4096
_STATUS: Final = (
    (NotFoundError, 404),
    (UnauthenticatedError, 403),
    (PermissionDeniedError, 403),
    (ConflictError, 409),
    (LimitError, 429),
    (InvalidInputError, 400),
)
ACTIONS: Final = ("stop", "resume", "delete")


@dataclass(frozen=True, slots=True)
class PageSettings:
    """The security settings of a page: who may open it, and what it may do."""

    address: PageAddress
    sessions: PageSessions
    operates: bool
    """The page has buttons that stop, resume and delete runs, with the page's own identity."""
    is_secure: bool
    """Browsers reach the page over TLS only, so cookies are marked as secure."""


class Page:
    """The HTTP routes of the dashboard, over one client of the coordinator."""

    def __init__(self, settings: PageSettings, client: AsyncClient, asking: AsyncClient) -> None:
        """Make the page. asking: a client for the banner, which waits less long than `client`."""
        self._settings, self._client, self._asking = settings, client, asking
        self._watch, self._books = CoordinatorWatch(asking), RunBooks(client)
        self._runs = RunsWatch(client)

    def app(self) -> PageGate:
        """Return the ASGI application, guarded by its gate."""
        routes = [
            Route("/", self.index),
            Route("/static/pictures.css", self.picture_styles),
            Route("/static/{name}", self.static),
            Route("/api/session", self.begin, methods=["POST"]),
            Route("/api/me", answer_errors(self.me)),
            Route("/api/runs", answer_errors(self.runs)),
            Route("/api/runs/{run_id}", answer_errors(self.run)),
            Route("/api/runs/{run_id}/{action}", answer_errors(self.act), methods=["POST"]),
            Route("/api/workers", answer_errors(self.workers)),
            Route("/api/panels", answer_errors(self.panels)),
            Route("/api/compare", answer_errors(self.compare)),
            Route("/pictures/{name}.svg", answer_errors(self.picture)),
            Route("/report/{run_id}.html", answer_errors(self.report)),
            Route("/api/events", answer_errors(self.events)),
            Route("/api/logs", answer_errors(self.logs)),
            Route("/api/stream", answer_errors(self.stream)),
        ]
        app = Starlette(routes=routes, lifespan=self._life)
        return PageGate(app, self._settings.address, self._settings.sessions)

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        async with self._client, self._asking:
            yield

    # ---- what anybody may have: it holds nothing of any run ----

    async def index(self, _request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        return FileResponse(STATIC / name) if name in FILES else Response(status_code=404)

    async def picture_styles(self, _request: Request) -> Response:
        return Response(stylesheet(), media_type="text/css")

    async def begin(self, request: Request) -> Response:
        """Give the browser a session cookie in exchange for the token in the address."""
        token = (await _body(request)).decode("ascii", "replace")
        cookie = self._settings.sessions.begin(token)
        if cookie is None:
            return JSONResponse({"error": "this token is not the page's"}, 403)
        response = JSONResponse({})
        response.set_cookie(
            self._settings.sessions.cookie,
            cookie,
            httponly=True,
            samesite="strict",
            secure=self._settings.is_secure,
        )
        return response

    # ---- what a session may ask ----

    async def me(self, _request: Request) -> Response:
        return _json({
            "version": version("stratagem"),
            "coordinator": self._client.address,
            "operates": self._settings.operates,
        })  # fmt: skip

    async def runs(self, _request: Request) -> Response:
        return _json(await self._client.runs())

    async def run(self, request: Request) -> Response:
        return _json(await self._books.status(request.path_params["run_id"]))

    async def workers(self, _request: Request) -> Response:
        client = self._client
        return _json([*await client.workers(), *await client.refused_workers()])

    async def panels(self, request: Request) -> Response:
        """Return a run's pictures for a width, each with a table of its numbers. If the run is
        long, they show only the events that could be read in time."""
        run_id = request.query_params.get("run", "")
        view = _view(request)
        draw = partial(panels_json, view=view)
        text = await self._books.drawing(run_id, _width(request), draw, view)
        return Response(text, media_type="application/json")

    async def compare(self, request: Request) -> Response:
        """Return pictures with curves of several runs, and the differences between their jobs."""
        ids = list(dict.fromkeys(request.query_params.get("runs", "").split(",")))
        check_compared(ids)
        view = _view(request)
        runs = await self._books.partial_runs(ids, view)
        panels = overlay_panels(runs, view.steps(max(run.status.step for run in runs)))
        pictures = await asyncio.to_thread(pictures_of, panels, _width(request), view)
        differences = job_differences([run.job for run in runs])
        answer = {**extent(runs), "runs": ids, "differences": differences, "panels": pictures}
        return _json(answer)

    async def picture(self, request: Request) -> Response:
        """Return one picture of a run as an SVG file."""
        name, width = request.path_params["name"], _width(request)
        draw = partial(picture_file, name=name)
        svg = await self._books.complete_drawing(request.query_params.get("run", ""), width, draw)
        if not svg:
            raise NotFoundError(f"the run has no picture {name[:40]!r}")
        return Response(svg, media_type="image/svg+xml", headers=_WITH_STYLES)

    async def report(self, request: Request) -> Response:
        """Return a run as one HTML page that can be kept."""
        run = await self._client.get(request.path_params["run_id"])
        made_at = time_text(time.time())
        text = await asyncio.to_thread(page, await run.shown(), made_at)
        return Response(text, media_type="text/html", headers=_WITH_STYLES)

    async def events(self, request: Request) -> Response:
        """Return events of a run: onward from an index, or backward before one, newest first."""
        asked = request.query_params
        limit = min(_number(request, "limit", 100), MAX_EVENTS)
        before = _number(request, "before", 0)
        run = await self._client.get(asked.get("run", ""))
        items = run.watch(
            _number(request, "from", 0),
            kinds=[kind for kind in asked.get("kinds", "").split(",") if kind],
            limit=limit,
            newest_first="newest" in asked,
            follow=False,
            before_index=before or None,
        )
        return _json([item async for item in items if isinstance(item, Event)])

    async def logs(self, request: Request) -> Response:
        """Return lines of a run's log from a number on; negative numbers count from the end."""
        run = await self._client.get(request.query_params.get("run", ""))
        lines = []
        async for line in run.logs(from_line=_number(request, "from_line", -200, low=-(2**31))):
            lines.append(line)
            if len(lines) >= MAX_LINES:
                break
        return _json(lines)

    async def stream(self, request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        from_index = int(last) + 1 if last.isascii() and last.isdigit() else 0
        from_index = from_index or _number(request, "from", 0)
        stream, run_id = TabStream(self._watch), request.query_params.get("run", "")
        if run_id:
            messages = stream.of_run(self._books.watch(run_id), from_index)
        else:
            messages = stream.of_runs(self._runs)
        return TabResponse(messages, media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """Stop, resume or delete a run, if the page may operate."""
        action = request.path_params["action"]
        if action not in ACTIONS:
            raise NotFoundError(f"{action[:40]!r} is not one of {', '.join(ACTIONS)}")
        if not self._settings.operates:
            raise PermissionDeniedError("this page is read-only; it was started without --operate")
        run = await self._client.get(request.path_params["run_id"])
        calls = {"stop": run.cancel, "resume": run.resume, "delete": run.delete}
        await calls[action]()
        self._books.watch(run.run_id).changed()
        return _json({})


def _width(request: Request) -> int:
    return min(max(_number(request, "width", 720), MIN_WIDTH), MAX_WIDTH)


def _view(request: Request) -> CurveView:
    first, last = _number(request, "from", 1), _number(request, "to", 0)
    if last and last <= first:
        raise InvalidInputError.at("to", f"{last} is not after {first}, the first step")
    columns = min(max(_number(request, "columns", 1), 1), 2)
    return CurveView(max(first, 1), last or None, "log" in request.query_params, columns)


Handler = Callable[[Request], Awaitable[Response]]


def answer_errors(handler: Handler) -> Handler:
    """Wrap a request handler so that errors of the client become responses with their messages."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except StratagemError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 503)
            return _json({"error": told(error)}, status)

    return handle


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def _number(request: Request, name: str, default: int, low: int = 0) -> int:
    text = request.query_params.get(name, str(default))
    try:
        number = int(text) if len(text) < 20 else low - 1
    except ValueError:
        number = low - 1
    if number < low:
        raise InvalidInputError.at(name, f"{text[:40]!r} is no number from {low}")
    return number


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return b""
    return body


# ---- Pictures ----
#
# The page takes the pictures of a run as SVG text, and the same numbers as a table.


def panels_json(run: ReportedRun, width: int, view: CurveView = WHOLE) -> str:
    """Return a run's pictures as JSON for the page, with the number of events they show."""
    pictures = pictures_of(panels_of(run, view), width, view)
    return as_json({**extent([run]), "panels": pictures})


def picture_file(run: ReportedRun, width: int, name: str) -> str:
    """Return one picture of a run as an SVG file; "" if it has none of this name."""
    panel = next((candidate for candidate in panels_of(run) if candidate.name == name), None)
    return "" if panel is None else panel.draw(width).svg_file


def extent(runs: Sequence[ReportedRun]) -> dict[str, int]:
    """Return the number of events of these runs that have been read, and the number that exist."""
    read = [run.course.num_events for run in runs]
    there = [run.status.event_index + 1 for run in runs]
    return {"num_read": sum(read), "num_events": sum(map(max, read, there))}


def panels_of(run: ReportedRun, view: CurveView = WHOLE) -> list[Panel]:
    """Return the panels (pictures) of a run in the order of the page."""
    curves = curve_panels(run, view.steps(run.status.step))
    return [*curves, *strategy_panels(run), time_line_panel(run)]


def pictures_of(panels: Sequence[Panel], width: int, view: CurveView) -> list[dict[str, Any]]:
    """Draw panels for a page's width; return each as JSON, with a table of its numbers."""
    pictures = [
        (panel, panel.picture(view.width_of(at, len(panels), width), log=view.log))
        for at, panel in enumerate(panels)
    ]
    return [
        {
            "title": panel.title,
            "note": panel.note,
            "svg": picture.svg,
            "steps": picture.steps,
            "headings": picture.table.headings,
            "rows": picture.table.rows,
        }
        for panel, picture in pictures
    ]
