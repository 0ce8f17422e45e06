import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from stratagem.common.observe.logs import about, setup_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_json_lines_say_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("coordinator", "info", json=True)
    log = structlog.get_logger("loop")
    with about(run_id="digits-1", round=3):
        log.info("round closed", reason="all in")
        log.debug("not shown")
    logging.getLogger("grpc").warning("%s lines", "foreign")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["event"] == "round closed"
    assert (first["run_id"], first["round"], first["reason"]) == ("digits-1", 3, "all in")
    assert (first["process"], first["level"], first["logger"]) == ("coordinator", "info", "loop")
    assert (second["event"], second["process"]) == ("foreign lines", "coordinator")
    assert "run_id" not in second


def test_tracebacks_do_not_show_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    for is_json in (True, False):
        setup_logging("worker", "info", json=is_json)
        try:
            secret = "-".join(["hunter", "2"])
            raise RuntimeError(f"refused after {len(secret)}")
        except RuntimeError:
            structlog.get_logger().exception("failed")
        shown = capsys.readouterr().err
        assert "refused after 8" in shown
        assert "hunter-2" not in shown
    with pytest.raises(ValueError, match="'loud' is not one of debug"):
        setup_logging("worker", "loud")
