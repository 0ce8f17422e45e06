"""What a site asks of secure aggregation: whose certificates count, and a sum that hides it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.site.decision import FitsRule, Offer, decide
from tests.worker.site.jobs import ANY, offered, site_of

pytestmark = pytest.mark.core

NOON = datetime(2026, 11, 23, 11, 0, tzinfo=UTC)
REQUIRED = f'{ANY}\nrequire = ["secure_aggregation"]'
PEERS = f'peers = ["sha256:{"a" * 64}"]\n'


def said(folder: Path, rule: str, options: dict[str, Any], *, is_masked: bool = True) -> str:
    offer = Offer(offered(options=options), "client_round", is_masked=is_masked)
    verdict = decide(site_of(folder, rule, head=PEERS), offer, NOON)
    prefix = "site st-anna refuses: "
    return "" if isinstance(verdict, FitsRule) else verdict.reason.removeprefix(prefix)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"secure_aggregation": {}}, ""),
        ({}, "the job has no secure_aggregation"),
        (
            {"secure_aggregation": {"threshold": 0.6}},
            "secure_aggregation.threshold 0.6 is less than 0.666667",
        ),
        (
            {"secure_aggregation": {"degree": 2}},
            "secure_aggregation.degree: the coordinator would draw who shares with whom",
        ),
    ],
)
def test_a_site_requires_a_sum_that_hides_it(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    told = said(tmp_path, REQUIRED, options)
    assert told == (f"its rule, require: {reason}" if reason else "")


def test_a_plan_without_masks_is_refused(tmp_path: Path) -> None:
    told = said(tmp_path, ANY, {"secure_aggregation": {}}, is_masked=False)
    assert told == "secure_aggregation: the plan asks for an update without masks"


def test_too_few_survivors_make_no_round_whatever_the_quorum(tmp_path: Path) -> None:
    assert said(tmp_path, f"{ANY}\nmin_clients = 4", {"secure_aggregation": {}}) == ""
    told = said(tmp_path, f"{ANY}\nmin_clients = 5", {"secure_aggregation": {}})
    assert "a round of the job may be made of 4 updates" in told


def test_who_requires_it_names_its_peers(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"accept\[0\].require: .*needs peers or peer_auth"):
        site_of(tmp_path, REQUIRED)
    assert site_of(tmp_path, ANY).pins is None
    pins = site_of(tmp_path, REQUIRED, head=PEERS).pins
    assert pins is not None
    assert pins.fingerprints == {"a" * 64}


@pytest.mark.parametrize("written", ["AB" * 32, "ab" * 32, ":".join(["AB"] * 32)])
def test_a_fingerprint_may_be_written_as_openssl_prints_it(tmp_path: Path, written: str) -> None:
    site = site_of(tmp_path, ANY, head=f'peers = ["sha256:{written}"]\n')
    assert site.pins is not None
    assert site.pins.fingerprints == {"ab" * 32}


@pytest.mark.parametrize("peers", ['["a"]', '["sha256:zz"]', f'["md5:{"a" * 64}"]'])
def test_a_peer_is_a_fingerprint(tmp_path: Path, peers: str) -> None:
    with pytest.raises(InvalidInputError, match="hex digits of a certificate's fingerprint"):
        site_of(tmp_path, ANY, head=f"peers = {peers}\n")


def test_an_authority_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="peer_authority"):
        site_of(tmp_path, ANY, head='peer_authority = "missing.pem"\n')
