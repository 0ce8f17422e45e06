"""Asks a process that has torch and the user's code about a job; this process loads neither.

The questions build the user's model, so they are answered by `stratagem.tools.questions` in a
process of its own.
"""

import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Final

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
    question: str, job: Job, *, import_path: Sequence[Path] = (), **asked: Any
) -> dict[str, Any]:
    """Return the answer to one question about a job; raises what the question raises.

    import_path: folders of the user's modules; unless given, this folder and that of the job file.
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
    done = subprocess.run(
        _PROGRAM,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **passive_waiting(os.environ)},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StratagemError(f"the question {question!r} could not be answered: {last}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise _error(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer


def _error(told: Mapping[str, Any]) -> StratagemError:
    if "violations" in told:
        return InvalidInputError(
            violations=[Violation(**violation) for violation in told["violations"]]
        )
    if "traceback" in told:
        return UserCodeError(told["type"], told["message"], told["traceback"], "this machine")
    return StratagemError(told["text"])
