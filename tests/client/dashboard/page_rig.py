"""A real coordinator without workers, a page of it, and a browser of few words."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratagem.client.dashboard.server import PageOptions, PageServer
from stratagem.client.sdk.blocking import Client, LoopThread
from stratagem.coordinator.app.app import App
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.service.serving import served
from tests.free_ports import free_port
from tests.patience import PATIENCE_S


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def value(self) -> Any:
        return json.loads(self.body)


@dataclass
class Browser:
    """Asks one page, with the cookie that it was given."""

    port: int
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def open(self, method: str, path: str, body: str = "", **headers: str) -> Any:
        """Send a request and return the response while it may still go on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        sent = {"Connection": "close"}
        sent |= {"Origin": f"http://127.0.0.1:{self.port}"} if method == "POST" else {}
        sent |= {"Cookie": self.cookie} if self.cookie else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in sent.items() if value}
        connection.request(method, path, body or None, sent)
        return connection.getresponse()

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> Answer:
        response = self.open(method, path, body, **headers)
        with response:
            return Answer(response.status, response.headers, response.read().decode())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def events(self, path: str, **headers: str) -> Iterator[tuple[str, int | None, Any]]:
        """Yield kind, index and value of each event of a stream, until it ends."""
        said: dict[str, str] = {}
        with self.open("GET", path, **headers) as response:
            assert response.status == 200, response.read()
            while line := response.readline().decode():
                name, _, text = line.rstrip("\n").partition(": ")
                if name:
                    said[name] = text
                    continue
                index = int(said["id"]) if "id" in said else None
                yield said["event"], index, json.loads(said["data"])
                said = {}


@dataclass
class PageRig:
    app: App
    client: Client
    browser: Browser
    url: str

    @property
    def token(self) -> str:
        return self.url.partition("#token=")[2]

    def submit(self, run_id: str, **changes: Any) -> None:
        self.client.submit(json.loads(job_text(LOCAL, **changes)), run_id)


@contextmanager
def page_of(coordinator: str, **options: Any) -> Iterator[tuple[Browser, str]]:
    """A page of a coordinator, its browser and its URL."""
    port = free_port()
    server = PageServer(PageOptions(f"127.0.0.1:{port}", **options), coordinator)
    with server.beside():
        yield Browser(port), server.url


@contextmanager
def rig(folder: Path, **options: Any) -> Iterator[PageRig]:
    """A coordinator, a client, and a page whose browser has not shown the token."""
    loop = LoopThread()
    coordinator = served(folder)
    app, address = loop.call(coordinator.__aenter__())
    try:
        with Client(address) as client, page_of(address, **options) as (browser, url):
            yield PageRig(app, client, browser, url)
    finally:
        loop.call(coordinator.__aexit__(None, None, None))
        loop.close()


def enter(at: PageRig) -> Browser:
    """Exchange the token for the cookie."""
    answer = at.browser.ask("POST", "/api/session", at.token)
    assert answer.status == 200, answer.body
    at.browser.cookie = answer.headers["set-cookie"].partition(";")[0]
    return at.browser
