"""Asks a process that has torch and the user's code about a job; this process loads neither.

The questions build the user's model, so they are answered by `stratagem.tools.questions` in a
process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Final

from stratagem.client.code.code_folder import bundle_of
from stratagem.client.code.notebook import cells
from stratagem.client.sdk.job_input import Job, parse_job
from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UnavailableError,
    UserCodeError,
    Violation,
)
from stratagem.common.code.bundle import digest_of
from stratagem.common.job import entry_points
from stratagem.common.process.cpu_threads import passive_waiting

_PROGRAM: Final = (sys.executable, "-m", "stratagem.tools.questions")
_LONG_S: Final = 30.0
"""After so long it is told at what the process is, and again after twice as long each time."""
_PLACE_S: Final = 2.0
"""How long whoever has interrupted waits to be told where the process was."""
_WHERE: Final = "where"
NO_TORCH: Final = (
    "the model has to be built for this, and torch is not installed here; "
    "pip install 'stratagem[worker]', or ask on a worker"
)


def import_folders(job: Job) -> tuple[Path, ...]:
    """Return the folders in which user code is looked for: the current folder, and that of the job
    file."""
    folders = [Path.cwd()]
    if isinstance(job, str | PathLike):
        folders.append(Path(job).absolute().parent)
    return tuple(dict.fromkeys(folders))


def ask(
    question: str,
    job: Job,
    *,
    import_path: Sequence[Path] = (),
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    complain: Callable[[str], None] = lambda _: None,
    **asked: Any,
) -> dict[str, Any]:
    """Return the answer to one question about a job; raises what the question raises.

    import_path: folders of the user's modules; unless given, this folder and that of the job file.
    tell: is given what is found before the answer. complain: is told where the process is when it
    takes long. Raises KeyboardInterrupt with the place where it was interrupted.
    """
    if find_spec("torch") is None:
        raise UnavailableError(NO_TORCH)
    spec = parse_job(job)
    request: dict[str, Any] = {
        "question": question,
        "job_json": spec.canonical_json(),
        "allow": entry_points(spec),
        "import_path": [str(path) for path in import_path or import_folders(job)],
        **asked,
    }
    code = cells.code_of(spec)
    if code is not None and code.path is not None:
        archive = bundle_of(code)
        request["code"] = {"digest": digest_of(archive), "archive": b64encode(archive).decode()}
    reply, returncode, last = _exchange(json.dumps(request), tell, complain)
    if reply is None or returncode != 0:
        raise StratagemError(f"the question {question!r} could not be answered: {last}")
    if "error" in reply:
        raise _error(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer


def _exchange(
    request: str, tell: Callable[[Mapping[str, Any]], None], complain: Callable[[str], None]
) -> tuple[Mapping[str, Any] | None, int, str]:
    """Return the answer of a process to a request, its exit code, and the last line of its
    errors."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            _PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **passive_waiting(os.environ)},
        ) as process,
    ):
        told: SimpleQueue[str] = SimpleQueue()
        reply = None
        try:
            threading.Thread(target=_read, args=(process.stdout, told), daemon=True).start()
            _write(process, request)
            reply = next(_replies(process, told, tell, complain), None)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_place_at_end(process, told)) from None
        finally:
            if reply is None:
                process.kill()
        returncode = process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
    return reply, returncode, last


def _read(source: IO[str], told: "SimpleQueue[str]") -> None:
    """Pass on all lines of a process, and an empty one at the end."""
    for line in source:
        told.put(line)
    told.put("")


def _write(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a process that has ended is seen by its output
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def _replies(
    process: "subprocess.Popen[str]",
    told: "SimpleQueue[str]",
    tell: Callable[[Mapping[str, Any]], None],
    complain: Callable[[str], None],
) -> Iterator[Mapping[str, Any]]:
    """Yield what is neither a finding nor a place, which are passed on as they come."""
    patience_s = _LONG_S
    while True:
        try:
            line = told.get(timeout=patience_s)
        except Empty:
            patience_s *= 2
            _write(process, _WHERE)
            continue
        if not line:
            return
        message = json.loads(line)
        if "finding" in message:
            tell(message["finding"])
            patience_s = _LONG_S
        elif "place" in message:
            complain(f"still {_words(message)}")
        else:
            yield message


def _place_at_end(process: "subprocess.Popen[str]", told: "SimpleQueue[str]") -> str:
    """Return the sentence on where a process is that is ended now."""
    _write(process, _WHERE)
    until_s = time.monotonic() + _PLACE_S
    with suppress(Empty):
        while line := told.get(timeout=max(0.0, until_s - time.monotonic())):
            message = json.loads(line)
            if "place" in message:
                return f"stopped {_words(message)}"
    return "stopped"


def _words(message: Mapping[str, str]) -> str:
    """Return what a process is at, and where."""
    place = message["place"]
    doing = f"at {message['at']}" if message["at"] else "at work"
    return f"{doing} ({place})" if place else doing


def _error(told: Mapping[str, Any]) -> StratagemError:
    if "violations" in told:
        return InvalidInputError(
            violations=[Violation(**violation) for violation in told["violations"]]
        )
    if "traceback" in told:
        return UserCodeError(told["type"], told["message"], told["traceback"], "this machine")
    return StratagemError(told["text"])
