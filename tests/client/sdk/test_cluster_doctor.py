"""What the doctor says about what was measured, and the command on a coordinator that is away."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from stratagem.client.sdk.doctor import Measured, _no_answer, judge
from stratagem.common.base.errors import (
    PermissionDeniedError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.observe.findings import Finding, Level, environment_of
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from tests.client.cli.command_line import invoke

pytestmark = pytest.mark.core

NOW_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


def environment(**changes: Any) -> types_pb2.Environment:
    well: dict[str, Any] = {
        "packages": {"stratagem": "1.0", "grpcio": "1.84", "torch": "2.6"},
        "open_files_limit": 4096,
        "malloc": "malloc: tuned for chunks of a tensor stream",
        "shared_memory_bytes": 2**30,
        "data_dir": "/data",
        "data_free_bytes": 50 * 2**30,
        "data_total_bytes": 100 * 2**30,
        "fsync_s": 0.001,
        "backends": ["gloo"],
    }
    return types_pb2.Environment(**{**well, **changes})


def worker(name: str = "w0", **changes: Any) -> pb.WorkerDiagnosis:
    alive, device = changes.pop("is_alive", True), changes.pop("device", "cpu")
    numerics = changes.pop("numerics", "abc")
    capability = types_pb2.Capability(
        device=device,
        numerics_fingerprint=numerics,
        numerics_description=f"torch on {numerics}",
        data_plane=changes.pop("data_plane", "trusted"),
    )
    info = pb.WorkerInfo(worker_id=name, address="h:1", is_alive=alive, capability=capability)
    well: dict[str, Any] = {"environment": environment(), "round_trip_s": 0.001}
    return pb.WorkerDiagnosis(info=info, **{**well, **changes})


def measured(*workers: pb.WorkerDiagnosis, **changes: Any) -> Measured:
    coordinator = changes.pop("coordinator", environment())
    well: dict[str, Any] = {
        "client": environment(),
        "answer": pb.DiagnoseResponse(environment=coordinator, term=1, workers=workers),
        "round_trip_s": 0.001,
        "clock_offset_s": 0.0,
        "now_s": NOW_S,
    }
    return Measured(**{**well, **changes})


def troubles(what: Measured) -> list[Finding]:
    return [each for each in judge("h:7070", what) if each.level is not Level.OK]


def trouble(what: Measured) -> tuple[str, str, str, str]:
    """The only one: (check, of whom, level, everything that is said)."""
    (found,) = troubles(what)
    assert found.advice
    return found.check, found.about, found.level.value, f"{found.found} -> {found.advice}"


def test_all_is_well() -> None:
    assert troubles(measured(worker("w0"), worker("w1"))) == []


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"open_files_limit": 256}, "open files", "warn", "ulimit -n"),
        ({"malloc": "malloc: left alone, off"}, "malloc", "warn", "STRATAGEM_MALLOC"),
        ({"data_free_bytes": 2**30}, "disk", "warn", "1.0 of 100.0 GiB free at /data"),
        ({"fsync_s": 0.2}, "fsync", "warn", "200.00 ms"),
        ({"fsync_s": 0.0}, "fsync", "fail", "cannot write"),
        ({"certificate_problem": "no key"}, "certificate", "fail", "no key"),
        ({"certificate_expires_s": NOW_S + 3 * DAY_S}, "certificate", "warn", "in 3 days"),
        ({"certificate_expires_s": NOW_S - DAY_S}, "certificate", "fail", "it has"),
    ],
)
def test_each_process_is_examined(
    changes: dict[str, Any], check: str, level: str, words: str
) -> None:
    ill = environment(**changes)
    for about, what in (
        ("coordinator", measured(worker(), coordinator=ill)),
        ("w0", measured(worker(environment=ill))),
    ):
        found = trouble(what)
        assert found[:3] == (check, about, level)
        assert words in found[3]


def test_workers_that_are_not_there() -> None:
    assert trouble(measured())[:3] == ("workers", "coordinator", "warn")
    lost = worker("w1", is_alive=False, problem="no heartbeat for 10 s", numerics="other")
    lost.info.silent_s = 185.0
    check, about, level, said = trouble(measured(worker(), lost))
    assert (check, about, level) == ("worker", "w1", "warn")
    assert "is lost, silent for 3:05: no heartbeat for 10 s" in said
    refused = pb.RefusedWorker(worker_id="w2", address="h:2", reason="nobody answers at h:2")
    answer = pb.DiagnoseResponse(environment=environment(), term=1, refused=[refused])
    check, about, level, said = trouble(measured(answer=answer))
    assert (check, about, level) == ("worker", "w2", "fail")
    assert "asks to be registered at h:2, and is refused: nobody answers at h:2" in said
    deaf = worker("w1", problem="UNAVAILABLE: refused")
    check, about, level, said = trouble(measured(worker(), deaf))
    assert (check, about, level) == ("worker", "w1", "fail")
    assert "h:1: UNAVAILABLE" in said
    assert "--advertise" in said


def test_a_quarantine_is_a_failure_beside_all_else() -> None:
    suspect = worker("w1")
    suspect.info.quarantine = "segment 3 was wrong"
    found = trouble(measured(worker(), suspect))
    assert found[:3] == ("worker", "w1", "fail")
    assert "gets no work: segment 3 was wrong -> " in found[3]
    assert "stratagem workers --release w1" in found[3]


PROBES = [
    types_pb2.PeerProbe(worker_id="w1", address="h:2", round_trip_s=0.01),
    types_pb2.PeerProbe(worker_id="w2", address="h:3", problem="DEADLINE_EXCEEDED: late"),
]
OLDER = {"stratagem": "0.9", "grpcio": "1.84", "torch": "2.6"}
NEWER = {"stratagem": "1.0", "grpcio": "1.84", "torch": "2.7"}
IDLE = environment(backends=["gloo"], cuda_devices=["H100"])


def beside(**changes: Any) -> Measured:
    """A worker that is well, and w1 with another environment."""
    return measured(worker("w0"), worker("w1", environment=environment(**changes)))


def alone(**changes: Any) -> Measured:
    return measured(worker(environment=environment(**changes)))


@pytest.mark.parametrize(
    ("what", "found", "words"),
    [
        (measured(worker(probes=PROBES)), "peers w0 fail", "does not reach w2 at h:3"),
        (measured(worker("w0"), worker("w1", numerics="x")), "numerics workers warn", "torch on x"),
        (beside(packages=OLDER), "versions stratagem fail", "1.0: client, coordinator, w0; 0.9: w"),
        (beside(packages=NEWER), "versions torch warn", ""),
        (measured(worker(clock_offset_s=-30.0)), "clock w0 warn", "30.000 s ahead of the coord"),
        (measured(worker(), clock_offset_s=-7.0), "clock client warn", "7.000 s ahead"),
        (measured(worker(), clock_offset_s=7.0), "clock client warn", "7.000 s behind"),
        (measured(worker(), round_trip_s=0.9), "connection h:7070 warn", ""),
        (alone(cuda_devices=["H100"]), "device w0 warn", ""),
        (measured(worker(device="cuda:0", environment=IDLE)), "torch w0 warn", "without nccl"),
        (alone(shared_memory_bytes=2**20), "shared memory w0 warn", ""),
    ],
)
def test_what_differs_between_workers_or_is_missing_on_one_is_named(
    what: Measured, found: str, words: str
) -> None:
    *about, said = trouble(what)
    assert " ".join(about) == found
    assert words in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UnauthenticatedError("the caller has shown neither"), "--token-file"),
        (PermissionDeniedError("it is for the scope read"), "a certificate of a client"),
        (WrongStateError("protocol version: this side speaks '1'"), "one version"),
        (UnavailableError("h:1 wants TLS: give --tls-ca"), "stratagem certs show"),
        (UnavailableError("Ssl handshake failed: certificate verify failed"), "the host that"),
        (StratagemError("Method not found!"), "older than this command"),
        (UnavailableError("no coordinator answers at h:1: connection refused"), "firewall"),
    ],
)
def test_a_coordinator_that_cannot_be_asked(error: StratagemError, words: str) -> None:
    found = _no_answer("h:1", error)
    assert found.level is Level.FAIL
    assert found.found == str(error)
    assert words in found.advice


def test_an_environment_is_what_there_is(tmp_path: Any) -> None:
    found = environment_of(tmp_path, ("torch", "no-such-package"))
    assert {"python", "stratagem", "grpcio", "torch"} <= set(found.packages)
    assert "no-such-package" not in found.packages
    assert found.fsync_s > 0.0
    assert 0 < found.data_free_bytes <= found.data_total_bytes
    assert list(tmp_path.iterdir()) == []
    assert environment_of(tmp_path / "absent").data_dir == ""


def test_the_command_fails_where_nobody_answers() -> None:
    done = invoke("doctor", "--coordinator", "127.0.0.1:1", "--format", "json")
    assert done.exit_code == 1
    (found,) = [each for each in json.loads(done.stdout) if each["level"] == "fail"]
    assert found["check"] == "connection"
    assert "connection refused" in found["found"]
    assert "stratagem health" in found["advice"]


@pytest.mark.parametrize(
    ("folder", "found", "meant", "data_plane", "said"),
    [
        ("", "", "", "trusted", None),
        ("", "", "ours", "tls", None),
        ("/states", "ours", "ours", "trusted", (Level.OK, "sees the coordinator's at /states")),
        ("", "", "ours", "trusted", (Level.WARN, "no --state-folder: .* (store-id ours)")),
        ("/states", "theirs", "ours", "trusted", (Level.WARN, "store-id theirs, and .* has ours")),
        (
            "/states",
            "",
            "ours",
            "trusted",
            (Level.WARN, "/states has no store-id, .* has ours"),
        ),
        ("/states", "ours", "", "trusted", (Level.WARN, "the coordinator has no folder")),
    ],
)
def test_a_worker_that_sees_another_folder_of_states_is_named(
    folder: str, found: str, meant: str, data_plane: str, said: tuple[Level, str] | None
) -> None:
    there = environment(state_folder=folder, store_id=found)
    all_of_it = measured(worker(environment=there, data_plane=data_plane))
    all_of_it.answer.store_id = meant
    told = [each for each in judge("h:1", all_of_it) if each.check == "states"]
    if said is None:
        assert told == []
        return
    (one,) = told
    assert (one.about, one.level) == ("w0", said[0])
    assert re.search(said[1].replace("(", r"\(").replace(")", r"\)"), one.found)
    assert bool(one.advice) == (one.level is Level.WARN)
