"""The page's server in front of a real coordinator, as browsers and others meet it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.dashboard import books, watches
from stratagem.client.dashboard.app import panels_json
from stratagem.client.dashboard.gate import CONTENT_POLICY
from stratagem.client.dashboard.server import PageOptions, PageServer
from stratagem.client.dashboard.values import CurveView
from stratagem.client.report.run import ReportedRun
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.ids import RunId
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role
from stratagem.coordinator.observe.logs import RunLogLine
from tests.client.dashboard.page_rig import PageRig, enter, page_of, rig
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

SCRIPT = "\x07<script>alert(1)</script>"


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """What is drawn has all events, and who is asked says why it does not answer, on a busy machine
    too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(books, "PATIENCE_S", PATIENCE_S)
        patch.setattr(watches, "ANSWER_S", PATIENCE_S)
        yield


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    """A page that only shows, and two runs."""
    with rig(tmp_path_factory.mktemp("page")) as made:
        made.submit("waiting")
        made.submit("ended", model={"entrypoint": "m:f", "kwargs": {"text": SCRIPT}})
        for _ in range(3):
            made.client.get("ended").cancel()
            made.client.get("ended").resume()
        made.client.get("ended").cancel()
        yield made


def test_without_the_token_there_is_the_empty_page_and_nothing_else(at: PageRig) -> None:
    browser = type(at.browser)(at.browser.port)
    for path in ("/", "/static/app.js", "/static/style.css", "/static/pictures.css"):
        answer = browser.get(path)
        assert (answer.status, answer.headers["content-security-policy"]) == (200, CONTENT_POLICY)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers
    assert "javascript" in browser.get("/static/app.js").headers["content-type"]
    for path in ("/api/runs", "/api/me", "/api/stream", "/api/logs?run=ended", "/api/none", "/x"):
        answer = browser.get(path)
        assert (answer.status, answer.headers["content-security-policy"]) == (401, CONTENT_POLICY)
    for path in ("/static/../page_app.py", "/static/%2e%2e/page_app.py", "/static/none.js"):
        assert browser.get(path).status in (401, 404)
    assert browser.ask("POST", "/api/session", "wrong").status == 403
    assert browser.ask("POST", "/api/session", "x" * 100_000).status == 403
    assert browser.ask("POST", "/api/session", at.token, Origin="http://evil.example").status == 403
    assert browser.ask("POST", "/api/session", at.token, Origin="").status == 403
    assert browser.get("/", Host="evil.example").status == 403
    answer = browser.ask("POST", "/api/session", at.token)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"stratagem-{browser.port}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    browser.cookie = cookie.partition(";")[0]
    assert browser.get("/api/me").value["operates"] is False
    assert browser.get("/api/me", Host="evil.example").status == 403
    assert browser.get("/api/stream", Origin="http://evil.example").status == 403


def test_it_says_what_the_client_says(at: PageRig) -> None:
    browser = enter(at)
    assert [run["run_id"] for run in browser.get("/api/runs").value] == ["ended", "waiting"]
    run = browser.get("/api/runs/ended").value
    assert run["phase"] == "CANCELLED"
    assert run["job"]["model"]["kwargs"] == {"text": "\\x07<script>alert(1)</script>"}
    assert run["reason"] == at.client.get("ended").status().reason
    assert browser.get("/api/runs/ended").headers["content-type"] == "application/json"
    assert browser.get("/api/workers").value == []
    missing = browser.get("/api/runs/none")
    assert (missing.status, missing.value) == (404, {"error": "run 'none' is not known"})
    drawn_of = browser.get("/api/panels?run=ended&width=400").value
    assert drawn_of["num_read"] == drawn_of["num_events"] == run["event_index"] + 1
    panels = drawn_of["panels"]
    assert panels[-1]["svg"].startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "style=" not in panels[-1]["svg"], "the content policy refuses it"
    assert panels[-1]["headings"]
    assert all(len(row) == len(panels[-1]["headings"]) for row in panels[-1]["rows"])
    assert browser.get("/api/events?run=ended&limit=x").status == 400
    assert browser.get("/api/events?run=ended&kinds=Nonsense").status == 400

    def indices(how: str) -> list[int]:
        return [event["index"] for event in browser.get(f"/api/events?run=ended{how}").value]

    every = indices("")
    assert every == list(range(len(every)))
    assert indices("&from=2&limit=2") == [2, 3]
    assert indices("&newest&limit=3") == every[:-4:-1]
    assert indices(f"&newest&limit=3&before={every[-3]}") == every[-4:-7:-1]
    assert indices("&kinds=RunCancelled,RunSubmitted")[0] == 0


def test_pictures_are_drawn_once_for_all_tabs_until_something_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawings: list[int] = []

    def counted(run: ReportedRun, width: int, view: CurveView) -> str:
        drawings.append(run.course.num_events)
        return panels_json(run, width, view)

    monkeypatch.setattr("stratagem.client.dashboard.app.panels_json", counted)
    with rig(tmp_path, operates=True) as at:
        at.submit("r-1")
        at.client.get("r-1").cancel()
        browser, path = enter(at), "/api/panels?run=r-1&width=400"
        first = browser.get(path).body
        assert [browser.get(path).body for _ in range(3)] == [first] * 3
        assert len(drawings) == 1
        at.client.get("r-1").resume()
        at.client.get("r-1").cancel()
        assert browser.get(path).status == 200
        assert drawings[1] == len(at.client.get("r-1").events()) > drawings[0]
        at.client.get("r-1").delete()
        assert browser.get(path).status == 404
        at.submit("r-1", seed=2)  # another run of this name
        assert browser.get(path).status == 200
        assert drawings[-1] == len(at.client.get("r-1").events()) < drawings[1]


def test_curves_have_the_last_steps_of_a_run_that_ends_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    history = AsyncRun.history

    async def counted(run: AsyncRun, *args: Any, **options: Any) -> Any:
        read.append((await run.status()).event_index)
        return await history(run, *args, **options)

    monkeypatch.setattr(AsyncRun, "history", counted)
    monkeypatch.setattr(books, "HISTORY_S", 3600.0)
    with rig(tmp_path) as at:
        at.submit("r-1")
        browser, path = enter(at), "/api/panels?run=r-1"
        for _ in range(2):
            assert browser.get(path).status == 200
        assert len(read) == 1
        run = at.client.get("r-1")
        run.cancel()
        for _ in range(2):
            assert browser.get(path).status == 200
        assert read[1:] == [run.status().event_index]


def test_runs_are_compared_and_pictures_and_reports_are_files(at: PageRig) -> None:
    browser = enter(at)
    answer = browser.get("/api/compare?runs=ended,waiting&width=400").value
    assert answer["runs"] == ["ended", "waiting"]
    differ = {each["key"]: each["values"] for each in answer["differences"]}
    assert differ["model.kwargs.text"] == ["\\x07<script>alert(1)</script>", None]
    assert "seed" not in differ
    for wrong in ("from=5&to=5", "from=-1", "to=x"):
        for path in ("/api/panels?run=ended", "/api/compare?runs=ended,waiting"):
            assert browser.get(f"{path}&{wrong}").status == 400
    for few in ("ended", "ended,ended", ",".join(map(str, range(9)))):
        assert browser.get(f"/api/compare?runs={few}").status == 400
    assert browser.get("/api/compare?runs=ended,none").status == 404
    picture = browser.get("/pictures/time-line.svg?run=ended&width=500")
    assert picture.headers["content-type"] == "image/svg+xml"
    assert picture.body.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert browser.get("/pictures/none.svg?run=ended").status == 404
    report = browser.get("/report/ended.html")
    assert report.headers["content-type"].startswith("text/html")
    assert "<script>alert" not in report.body
    for each in (picture, report):
        policy = each.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
        assert "script-src" not in policy
        assert each.headers["x-content-type-options"] == "nosniff"
    assert browser.get("/report/none.html").status == 404
    browser.cookie = ""
    for path in (
        "/report/ended.html",
        "/pictures/time-line.svg?run=ended",
        "/api/compare?runs=a,b",
    ):
        assert browser.get(path).status == 401


def test_lines_of_a_log_cannot_move_the_cursor(at: PageRig) -> None:
    browser = enter(at)
    at.app.logs.add(RunId("waiting"), RunLogLine(1.0, "w", "PRINT", "\x1b[2J</pre><script>\u202e"))
    lines = browser.get("/api/logs?run=waiting").value
    assert lines[-1]["text"].endswith("</pre><script>\\x202e")
    assert lines[-1]["text"].startswith("\\x1b")
    assert browser.get("/api/logs?run=waiting&from_line=-1").value == lines[-1:]
    behind = browser.get(f"/api/logs?run=waiting&from_line={len(lines)}").value
    assert behind == []


def test_a_stream_goes_on_behind_the_last_event_that_was_seen(at: PageRig) -> None:
    browser = enter(at)
    seen = [(kind, index) for kind, index, _ in _until_end(browser.events("/api/stream?run=ended"))]
    indices = [index for kind, index in seen if kind == "fact"]
    assert indices == list(range(len(indices)))
    assert all(index is None for kind, index in seen if kind != "fact")
    again = _until_end(browser.events("/api/stream?run=ended&from=1", Last_Event_ID="3"))
    assert [index for kind, index, _ in again if kind == "fact"] == indices[4:]
    kinds = browser.events("/api/stream?run=none")
    assert "gone" in {kind for kind, _, _ in (next(kinds), next(kinds))}


def _until_end(events: Iterator[tuple[str, int | None, Any]]) -> Iterator[Any]:
    for event in events:
        if event[0] == "end":
            return
        yield event


def test_one_stream_tells_of_all_runs_and_of_the_coordinator(at: PageRig) -> None:
    browser = enter(at)
    runs: dict[str, Any] = {}
    beats = set()
    at.submit("later")
    for kind, _, value in browser.events("/api/stream"):
        if kind == "beat":
            beats.add(value["state"])
        elif kind == "runs":
            runs |= {run["run_id"]: run for run in value["runs"]}
            if value["is_complete"] and runs["later"]["phase"] == "PLACING":
                at.client.get("later").cancel()
        if "live" in beats and runs.get("later", {}).get("phase") == "CANCELLED":
            break
    assert set(runs) == {"waiting", "ended", "later"}


def test_a_page_that_only_shows_stops_nothing(at: PageRig) -> None:
    browser = enter(at)
    for action in ("stop", "resume", "delete"):
        answer = browser.ask("POST", f"/api/runs/waiting/{action}")
        assert (answer.status, "--operate" in answer.value["error"]) == (403, True)
    assert browser.get("/api/runs/waiting").value["phase"] == "PLACING"
    assert browser.get("/api/runs/waiting/stop").status == 405


def test_a_page_that_operates_does_as_its_owner(tmp_path: Path) -> None:
    with rig(tmp_path, operates=True) as at:
        at.submit("r-1")
        browser = enter(at)
        assert browser.get("/api/me").value["operates"] is True
        for origin in ("", "http://evil.example"):
            assert browser.ask("POST", "/api/runs/r-1/stop", Origin=origin).status == 403
        assert browser.get("/api/runs/r-1").value["phase"] == "PLACING"
        assert browser.ask("POST", "/api/runs/r-1/delete").status == 409
        assert browser.ask("POST", "/api/runs/r-1/stop").status == 200
        assert browser.get("/api/runs/r-1").value["phase"] == "CANCELLED"
        assert browser.ask("POST", "/api/runs/r-1/eat").status == 404
        assert browser.ask("POST", "/api/runs/r-1/delete").status == 200
        assert browser.get("/api/runs/r-1").status == 404


def test_the_beat_says_that_no_coordinator_answers() -> None:
    with page_of(f"127.0.0.1:{free_port()}") as (browser, url):
        answer = browser.ask("POST", "/api/session", url.partition("#token=")[2])
        browser.cookie = answer.headers["set-cookie"].partition(";")[0]
        states = (value for kind, _, value in browser.events("/api/stream") if kind == "beat")
        beat = next(value for value in states if value["state"] != "connecting")
        assert beat["state"] == "away"
        assert "no coordinator answers" in beat["why"]
        answer = browser.get("/api/runs")
        assert (answer.status, "no coordinator answers" in answer.value["error"]) == (503, True)


def test_options_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--page-tls-cert"):
        PageServer(PageOptions("127.0.0.1:0", tls_cert=tmp_path / "c.pem"), "127.0.0.1:1")
    with pytest.raises(InvalidInputError, match="--listen"):
        PageServer(PageOptions("0.0.0.0:7080"), "127.0.0.1:1")
    with pytest.raises(InvalidInputError, match=r"--listen: 'nowhere' .*such as nowhere:7080"):
        PageServer(PageOptions("nowhere"), "127.0.0.1:1")
    token = tmp_path / "token"
    token.write_text("x" * 24)
    token.chmod(0o600)
    authority = make_authority(tmp_path / "ca")
    for name, hosts in (("named", ("runs.example", "10.0.0.5")), ("bare", ())):
        authority.issue(Role.COORDINATOR, name, hosts)

    def page(name: str) -> str:
        cert, key = (authority.folder / f"{name}.{kind}" for kind in ("crt", "key"))
        with_tls = PageOptions("0.0.0.0:0", False, token, cert, key)
        server = PageServer(with_tls, "127.0.0.1:1")
        with server.beside():
            return server.url

    assert page("named").startswith("https://runs.example:")
    with pytest.raises(
        InvalidInputError, match=r"--public-url: missing: .* --public-url https://H"
    ):
        page("bare")
    with pytest.raises(InvalidInputError, match=r"--page-tls-cert: .*No such file"):
        PageServer(
            PageOptions("0.0.0.0:0", False, token, tmp_path / "no", tmp_path / "no"), "127.0.0.1:1"
        )


def test_where_a_port_is_taken_it_is_said_and_any_other_will_do() -> None:
    with page_of("127.0.0.1:1") as (browser, _):
        with pytest.raises(UnavailableError, match=f"{browser.port}: Address already in use"):
            PageServer(PageOptions(f"127.0.0.1:{browser.port}"), "127.0.0.1:1")
        with PageServer(PageOptions("127.0.0.1:0"), "127.0.0.1:1").beside():
            pass
