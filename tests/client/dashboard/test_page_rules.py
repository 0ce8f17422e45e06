"""Where a page may be served, whose requests it takes, and how values become its JSON."""

import json
import math
from pathlib import Path

import pytest

from stratagem.client.course.views import Progress
from stratagem.client.dashboard.gate import (
    PageAddress,
    PageSessions,
    address_of,
    origin_of,
    token_in,
    why_not,
)
from stratagem.client.dashboard.values import as_json, plain, server_sent
from stratagem.common.base.errors import InvalidInputError


def address(
    host: str = "127.0.0.1",
    *,
    has_tls: bool = False,
    public_url: str = "",
    has_token: bool = False,
    behind_proxy: bool = False,
    names: tuple[str, ...] = (),
) -> PageAddress:
    return address_of(
        host,
        7080,
        has_tls=has_tls,
        public_url=public_url,
        has_token=has_token,
        behind_proxy=behind_proxy,
        names=names,
    )


def test_the_page_of_this_machine_has_its_three_names() -> None:
    assert address().origins == {
        "http://127.0.0.1:7080",
        "http://localhost:7080",
        "http://[::1]:7080",
    }
    assert address().printed == "http://127.0.0.1:7080"
    assert address("::1").printed == "http://[::1]:7080"


def test_elsewhere_it_takes_a_token_and_tls() -> None:
    for has_token, has_tls in ((False, False), (True, False), (False, True)):
        with pytest.raises(InvalidInputError, match="--listen"):
            address("10.0.0.5", has_token=has_token, has_tls=has_tls)
    with_tls = address("10.0.0.5", has_token=True, has_tls=True)
    assert with_tls.origins == {"https://10.0.0.5:7080"}
    with pytest.raises(InvalidInputError, match="--behind-proxy"):
        address("0.0.0.0", has_token=True, behind_proxy=True)
    behind = address(
        "0.0.0.0", has_token=True, behind_proxy=True, public_url="https://Runs.Example:443/"
    )
    assert behind.origins == {"https://runs.example"}, "no other name leads to it"
    assert behind.printed == "https://runs.example"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_all_addresses_of_a_machine_take_a_name_that_browsers_know(host: str) -> None:
    """At its start, not as a refusal of each request."""
    with pytest.raises(InvalidInputError) as caught:
        address(host, has_token=True, has_tls=True)
    assert str(caught.value).startswith("--public-url: missing: nobody opens a page at ")
    assert "write --public-url https://HOST:7080" in str(caught.value)
    found = address(host, has_token=True, has_tls=True, names=("runs.example", "10.0.0.5"))
    assert found.origins == {"https://runs.example:7080", "https://10.0.0.5:7080"}
    assert found.printed == "https://runs.example:7080"
    chosen = {"public_url": "https://x.example:7080", "names": ("runs.example",)}
    assert address(host, has_token=True, has_tls=True, **chosen).origins == {  # type: ignore[arg-type]
        "https://x.example:7080"
    }
    one = address("10.0.0.5", has_token=True, has_tls=True, names=("runs.example",))
    assert one.origins == {"https://10.0.0.5:7080", "https://runs.example:7080"}
    assert one.printed == "https://10.0.0.5:7080"


@pytest.mark.parametrize("url", ["runs.example", "ftp://a", "http://", "http://a:b", "http://a/b"])
def test_a_public_url_is_an_origin(url: str) -> None:
    with pytest.raises(InvalidInputError, match="--public-url"):
        origin_of(url)


@pytest.mark.parametrize(
    ("method", "headers", "refused"),
    [
        ("GET", {"host": "127.0.0.1:7080"}, ""),
        ("GET", {"host": "localhost:7080", "origin": "http://localhost:7080"}, ""),
        ("GET", {}, "another address"),
        ("GET", {"host": "evil.example:7080"}, "another address"),
        ("GET", {"host": "127.0.0.1:7081"}, "another address"),
        ("GET", {"host": "127.0.0.1:7080", "origin": "http://evil.example"}, "another page"),
        ("GET", {"host": "127.0.0.1:7080", "origin": "null"}, "another page"),
        ("GET", {"host": "127.0.0.1:7080", "sec-fetch-site": "cross-site"}, ""),
        ("POST", {"host": "127.0.0.1:7080"}, "where it comes from"),
        ("POST", {"host": "127.0.0.1:7080", "origin": "http://127.0.0.1:7080"}, ""),
        ("POST", {"host": "127.0.0.1:7080", "origin": "https://127.0.0.1:7080"}, "another page"),
        (
            "POST",
            {
                "host": "127.0.0.1:7080",
                "origin": "http://127.0.0.1:7080",
                "sec-fetch-site": "same-site",
            },
            "another site",
        ),
    ],
)
def test_only_pages_of_its_own_are_answered(
    method: str, headers: dict[str, str], refused: str
) -> None:
    reason = why_not(address(), method, headers)
    assert refused in reason
    assert bool(refused) == bool(reason)


def test_a_token_begins_sessions_that_another_start_with_it_knows(tmp_path: Path) -> None:
    sessions = PageSessions("t" * 20, 7080)
    assert sessions.begin("wrong") is None
    assert sessions.begin("\u00e9") is None
    first, second = sessions.begin("t" * 20), sessions.begin("t" * 20)
    assert first != second
    assert sessions.knows(f"a=b; stratagem-7080={first}")
    for header in ("", "stratagem-7081=" + str(first), f"stratagem-7080={first}x", "\x00;;=", "="):
        assert not sessions.knows(header)
    number, _, signature = str(first).partition(".")
    for value in (
        number,
        f"{number}.",
        f".{signature}",
        f"x{number}.{signature}",
        f"{number}.\u00e9",
    ):
        assert not sessions.knows(f"stratagem-7080={value}"), value
    assert PageSessions("t" * 20, 7080).knows(f"stratagem-7080={first}")
    for other in (PageSessions("u" * 20, 7080), PageSessions("t" * 20, 7081)):
        assert not other.knows(f"{other.cookie}={first}")
    file = tmp_path / "token"
    for text in ("short", "x" * 15 + "\u00e9", "x" * 20 + "\x07y"):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match="--page-token-file"):
            token_in(file)
    file.write_text("x" * 20 + "\n")
    assert token_in(file) == "x" * 20
    with pytest.raises(InvalidInputError, match="--page-token-file"):
        token_in(tmp_path / "none")


def test_values_are_printable_and_numbers_are_json() -> None:
    said = plain({"a\x1b[31m": "\x07<script>\u202e", "loss": math.nan, "worse": -math.inf})
    assert said == {"a": "\\x07<script>\\x202e", "loss": "nan", "worse": "-inf"}
    progress = Progress(1, 2, math.inf, 0.0, 0, 0, 0, 0, "", metrics={"train.x": math.nan})
    read = json.loads(as_json(progress))
    assert (read["loss"], read["metrics"], read["eta_s"]) == ("inf", {"train.x": "nan"}, None)


def test_a_text_with_newlines_stays_one_event() -> None:
    message = server_sent("fact", {"text": "a\n\nevent: x\r\ndata: y\u2028"}, 7).decode()
    assert message.startswith("id: 7\nevent: fact\ndata: ")
    assert message.count("\n") == 4
    assert "\r" not in message
