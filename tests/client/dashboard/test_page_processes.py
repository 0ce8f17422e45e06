"""The page as users begin and end it: processes of the product, with tokens and certificates, and a
browser that looks at them."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.dashboard.start import page_of as page_at
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.identity.callers import Scope, add_token, new_token
from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.rpc.channel import Proof
from tests.client.dashboard.page_process import PageProcess, command
from tests.client.dashboard.page_rig import page_of
from tests.client.dashboard.page_tabs import expect, go
from tests.cluster.jobs import gates_in
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.crash.hands import free_address, hands
from tests.identity.rig import flags
from tests.jobs import document, user_data
from tests.patience import PATIENCE_S
from tests.postgres import Postgres
from tests.repository import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

VALUES = "all => all.map(each => each.value)"
OWN_TOKEN = "a-token-of-the-users-own"


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """A tab of a page whose certificate the browser has not been told of."""
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def live(page: Any) -> None:
    expect(page.locator("#banner")).to_have_text("live")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = make_authority(tmp_path / "certs")
    made.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"])
    made.issue(Role.COORDINATOR, "page", ["127.0.0.1"])
    made.issue(Role.CLIENT, "alice")
    return made


@contextmanager
def secured(authority: Authority, folder: Path) -> Iterator[tuple[LocalCluster, str]]:
    """A coordinator with certificates, and where it answers people with tokens: "reader", whose
    token is in the file token.reader and reads, and no more."""
    files, tokens, for_tokens = authority.files("coordinator"), folder / "tokens", free_address()
    token, known = new_token("reader", [Scope.READ])
    add_token(tokens, known)
    (folder / "token.reader").write_text(token)
    environment = {
        "STRATAGEM_COORDINATOR_TLS_CA": str(files.ca),
        "STRATAGEM_COORDINATOR_TLS_CERT": str(files.cert),
        "STRATAGEM_COORDINATOR_TLS_KEY": str(files.key),
        "STRATAGEM_COORDINATOR_TOKENS_FILE": str(tokens),
        "STRATAGEM_COORDINATOR_TOKEN_LISTEN": for_tokens,
    }
    data = folder / "data"
    with LocalCluster(workers=0, data_dir=data, environment=environment) as cluster:
        yield cluster, for_tokens


def reads_and_no_more(browser: Any, authority: Authority, coordinator: str, folder: Path) -> None:
    """A page that may not what its buttons say: the coordinator refuses, and the page says so; and
    one whose token the coordinator does not know."""
    ca, asked = authority.files("page").ca, list[str]()
    words = ("dashboard", "--coordinator", coordinator, "--listen", "127.0.0.1:0", "--operate")
    with (
        command(folder, *words, "--tls-ca", ca, "--token-file", "token.reader") as process,
        opened(browser, process.url) as page,
    ):

        def agree(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept()

        page.on("dialog", agree)
        live(page)
        go(page, "runs/r-1")
        with page.expect_response(lambda each: each.url.endswith("/stop")) as refusal:
            page.get_by_role("button", name="stop").click()
        assert refusal.value.status == 403
        expect(page.locator(".head .phase")).to_have_text("placing · waiting")
        page.wait_for_event("dialog", lambda _: len(asked) > 1) if len(asked) < 2 else None
        assert "reader" in asked[1]
        assert process.end(signal.SIGINT) == 130
    wrong = folder / "token.wrong"
    wrong.write_text("stratagem_" + "x" * 43)
    proof = Proof(TlsFiles(ca, None, None), wrong)
    server = page_at(coordinator, proof, {"listen": "127.0.0.1:0"})
    with server.beside(), opened(browser, server.url) as page:
        expect(page.locator("#banner")).to_contain_text("not allowed")


def test_a_page_with_certificates_acts_as_its_owner_and_goes_on_after_a_kill(
    browser: Any, authority: Authority, tmp_path: Path
) -> None:
    page_files, alice = authority.files("page"), authority.files("client-alice")
    own = tmp_path / "page.token"
    own.write_text(OWN_TOKEN)
    listen = free_address()
    with (
        secured(authority, tmp_path) as (cluster, for_tokens),
        Client(cluster.address, tls=alice) as client,
    ):
        client.submit(json.loads(job_text(LOCAL)), "r-1")
        reads_and_no_more(browser, authority, for_tokens, tmp_path)
        words = ("dashboard", "--coordinator", cluster.address, "--listen", listen, "--operate")
        page_words = ("--page-token-file", own, "--page-tls-cert", page_files.cert)
        every = (*words, *flags(alice), *page_words, "--page-tls-key", page_files.key)
        with command(tmp_path, *every) as first:
            assert first.url == f"https://{listen}"
            assert "its buttons act as you" in first.line("page of")
            with opened(browser, first.url) as page:
                page.locator("#token").fill(OWN_TOKEN)
                page.keyboard.press("Enter")
                live(page)
                go(page, "runs/r-1")
                expect(page.locator(".head .quiet")).to_contain_text("by client alice")
                page.on("dialog", lambda dialog: dialog.accept())
                page.get_by_role("button", name="stop").click()
                expect(page.locator(".head .phase")).to_have_text("cancelled")
                run = client.get("r-1")
                assert run.status().phase == "CANCELLED"
                goes_on_after_a_kill(page, first, run, every, tmp_path)


def goes_on_after_a_kill(
    page: Any, first: PageProcess, run: Any, words: tuple[object, ...], folder: Path
) -> None:
    """What happens while nobody serves the page comes once it is served again, each event once."""
    seen = run.status().event_index
    expect(page.locator(".events li")).to_have_count(seen + 1)
    first.end(signal.SIGKILL)
    expect(page.locator("#banner")).to_contain_text("reconnecting to the page’s server")
    expect(page.locator("main.stale")).to_have_count(1)
    run.resume()
    with command(folder, *words) as again:
        live(page)
        expect(page.locator(".head .phase")).to_have_text("placing · waiting")
        each_once(page, run.status().event_index)
        assert again.end(signal.SIGTERM) == 130


def each_once(page: Any, newest: int) -> None:
    """All events are shown, the newest first."""
    events = page.locator(".events li")
    expect(events).to_have_count(newest + 1)
    assert events.evaluate_all(VALUES) == list(range(newest, -1, -1))


def test_pages_beside_a_cluster_and_a_run_begin_and_end_with_them(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "gates").mkdir()
    job = document(data=user_data("gated", folder=str(tmp_path / "gates")))
    (tmp_path / "job.json").write_text(json.dumps(job))
    up_words = ("up", "--workers", 1, "--threads", 1, "--listen", "127.0.0.1:0", "--web")
    where = ("--data-dir", tmp_path / "cluster", "--import-path", ROOT)
    with gates_in(tmp_path / "gates") as gates, command(tmp_path, *up_words, *where) as up:
        gates.close("batch-4")
        coordinator = up.line("coordinator at").split()[2].rstrip(",")
        run_words = ("run", "job.json", "--coordinator", coordinator, "--run-id", "r-1", "--web")
        with (
            command(tmp_path, *run_words) as run,
            opened(browser, up.url) as page,
            opened(browser, run.url) as other,
        ):
            gates.wait_reached("batch-4")
            for each in (page, other):
                live(each)
                go(each, "runs/r-1")
                expect(each.locator(".head .phase")).to_contain_text("running")
            go(page, "workers")
            expect(page.get_by_role("row", name="worker-0")).to_contain_text("r-1")
            gates.open()
            assert run.ended() == 0
            expect(other.locator("#banner")).to_contain_text("reconnecting to the page’s")
            go(page, "runs/r-1")
            expect(page.locator(".head .phase")).to_contain_text("completed")
            assert up.end(signal.SIGTERM) == 130
            expect(page.locator("#banner")).to_contain_text("reconnecting to the page’s")


def test_a_local_run_with_a_page_is_stopped_by_ctrl_c(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "gates").mkdir()
    job = document(data=user_data("gated", folder=str(tmp_path / "gates")))
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {"PYTHONPATH": str(ROOT)}
    words = ("run", "job.json", "--local", 1, "--run-id", "r-1", "--web", "--data-dir", "data")
    with (
        gates_in(tmp_path / "gates") as gates,
        command(tmp_path, *words, environment=environment) as run,
    ):
        gates.close("batch-4")
        with opened(browser, run.url) as page:
            live(page)
            gates.wait_reached("batch-4")
            go(page, "runs/r-1")
            expect(page.locator(".head .phase")).to_contain_text("running")
            assert run.end(signal.SIGINT) == 130
            expect(page.locator("#banner")).to_contain_text("reconnecting to the page’s")


def test_the_page_follows_the_standby_that_leads(
    browser: Any, tmp_path: Path, postgres: Postgres
) -> None:
    a, b = free_address(), free_address()
    given = ("--lease-ttl-s", "2", "--journal", postgres.new_schema())
    with hands(tmp_path, *given) as started:
        leader = started.coordinator("a", listen=a)
        assert leader.address == a
        started.coordinator("b", listen=b)
        with Client(f"{a},{b}") as client, page_of(f"{a},{b}") as (_, url):
            client.submit(json.loads(job_text(LOCAL)), "r-1")
            with opened(browser, url) as page:
                live(page)
                go(page, "runs/r-1")
                run = client.get("r-1")
                expect(page.locator(".events li")).to_have_count(run.status().event_index + 1)
                leader.kill()
                run.cancel()  # which waits for the standby
                expect(page.locator(".head .phase")).to_have_text("cancelled")
                live(page)
                each_once(page, run.status().event_index)
