"""Logging of every process: structlog to stderr, as text for people or JSON for machines.

The module has the format, and the names of the subjects of a log line (run_id, party, segment or
round, worker_id, term). Loggers of other libraries (grpc, sqlalchemy) use the same form.

    log = structlog.get_logger()
    with about(run_id=run_id, round=3):
        log.info("round closed", reason=reason)
"""

import logging
import sys
from contextlib import AbstractContextManager
from typing import Final

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS: Final = ("debug", "info", "warning", "error")
_GRPC: Final = "grpc._cython.cygrpc"
_LEFT: Final = "ExecuteBatchError raised in core by servicer method"
_process_ids: dict[str, str | int] = {}


def setup_logging(process: str, level: str = "info", json: bool = False) -> None:
    """Send all logs of this process to stderr; `process` is its name in every line."""
    if level not in LEVELS:
        raise ValueError(f"log level: {level!r} is not one of {', '.join(LEVELS)}")
    shared = _shared_processors(process)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_form(json)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("alembic").setLevel(max(root.level, logging.WARNING))  # else twice a step
    logging.getLogger(_GRPC).addFilter(_no_alarm_at_callers_who_leave)


def _no_alarm_at_callers_who_leave(record: logging.LogRecord) -> bool:
    """Drop the error with a traceback that gRPC logs when a caller cancels a call while the server
    writes to it. Every watcher causes one if it ends while the coordinator waits for it to read."""
    if _LEFT not in record.getMessage():
        return True
    record.levelno, record.levelname = logging.INFO, "INFO"
    record.msg, record.exc_info = "the caller has left in the middle of an answer", None
    record.args = ()
    return logging.getLogger().isEnabledFor(logging.INFO)


def about(
    *,
    run_id: str | None = None,
    party: str | None = None,
    segment: int | None = None,
    round: int | None = None,  # noqa: A002  (the word of the log line)
    worker_id: str | None = None,
    term: int | None = None,
    membership: int | None = None,
) -> AbstractContextManager[None]:
    """Context manager that adds the subjects (run, party, worker, ...) to all log lines of the
    block, also across awaits and in tasks started in it."""
    given = {
        "run_id": run_id,
        "party": party,
        "segment": segment,
        "round": round,
        "worker_id": worker_id,
        "term": term,
        "membership": membership,
    }
    context: AbstractContextManager[None] = bound_contextvars(
        **{key: value for key, value in given.items() if value is not None}
    )
    return context


def identify(*, worker_id: str | None = None, term: int | None = None) -> None:
    """Add the id of this worker, or the leadership term of this coordinator, to every later log
    line. The line's own values take precedence."""
    given = {"worker_id": worker_id, "term": term}
    _process_ids.update({key: value for key, value in given.items() if value is not None})


def _shared_processors(process: str) -> list[Processor]:
    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        for key, value in _process_ids.items():
            event.setdefault(key, value)
        return event

    return [
        merge_contextvars,
        add_process,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.UnicodeDecoder(),
    ]


def _form(json: bool) -> list[Processor]:
    # Tracebacks without local variables: those may hold tokens and private rows.
    if json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [
        _without_root,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain),
    ]


def _without_root(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Drop the field `party` from log lines about a run's root party, whose name is empty."""
    if event.get("party") == "":
        del event["party"]
    return event
