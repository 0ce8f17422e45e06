"""Answer one question about a job, as JSON: `python -m stratagem.tools.questions`.

The SDK and the command line run this as a separate process, because they load neither torch nor the
user's code. The first line of standard input is the request; standard output has the findings as
they are made, and then the answer. The process answers each further line of input with the present
place in the user's code. Output of user code goes to standard error.
"""

import json
import os
import signal
import sys
import threading
import traceback
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

import torch

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.common.observe.findings import Finding
from stratagem.common.process.cpu_threads import default_threads
from stratagem.common.schema.json import not_one_of
from stratagem.tools.check.check import check_job
from stratagem.tools.export.export import (
    example_inputs,
    sizes_of,
    trained_model,
    without_cache,
    write_hf_folder,
    write_onnx,
    write_program,
)
from stratagem.tools.memory.estimate import StepMemory, estimate_memory, text_of
from stratagem.tools.memory.play import Site
from stratagem.tools.memory.recommend import CandidateWorker, Fleet, alone, recommend, resolve
from stratagem.worker.data.sources import DataSources
from stratagem.worker.host.stalls import StackFrame, cause_of, per_thread
from stratagem.worker.user_code.bundles import CodeStore, plain_path
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Place of a thread ----
#
# The place is described in words, for the process that waits for the thread.


def place_of_thread(ident: int) -> str:
    """Return the innermost line of user code that a thread is executing; "" if it has ended."""
    frame = sys._current_frames().get(ident)
    stack = [
        StackFrame(
            str(each.f_globals.get("__name__", "")),
            plain_path(each.f_code.co_filename),
            line,
            each.f_code.co_name,
        )
        for each, line in traceback.walk_stack(frame)
    ]
    return cause_of(stack, ()).place if frame is not None else ""


# ---- Main program ----

DEVICES: Final = ("cpu", "cuda")


Say: TypeAlias = Callable[[Mapping[str, Any]], None]
"""A function that sends an interim result to the asking process, before the answer."""


def answer(request: Mapping[str, Any], say: Say = lambda _: None) -> dict[str, Any]:
    """Return the answer to one request. Raises whatever the question's check raises."""
    job, bundles = JobSpec.from_json(request["job_json"]), CodeStore(None)
    try:
        site = _site(request, bundles)
        if request["question"] == "check":
            return _check(job, site, request, say)
        return _QUESTIONS[request["question"]](job, site, request)
    finally:
        bundles.close()


def _estimate(job: JobSpec, site: Site, request: Mapping[str, Any]) -> dict[str, Any]:
    memory, reason = _memory_of(job, site, request)
    notes = [*memory.notes, *([reason] if reason else [])]
    return {**memory.document(), "notes": notes, "text": str(memory)}


def _memory_of(job: JobSpec, site: Site, request: Mapping[str, Any]) -> tuple[StepMemory, str]:
    num_workers = request.get("num_workers")
    fleet = Fleet.of_equals(num_workers or job.execution.num_workers, site.device.type)
    resolved, reason = (alone(job), "") if job.only_evaluates else resolve(job, site, fleet)
    memory = estimate_memory(
        resolved,
        site,
        num_workers=num_workers,
        inference=bool(request.get("inference")),
        measure=bool(request.get("measure")),
    )
    return memory, reason


def _check(job: JobSpec, site: Site, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    def memory() -> str:
        needed, reason = _memory_of(job, site, request)
        text = f"{text_of(needed.needed)} on {needed.device} of each worker, {needed.rows} rows"
        return "; ".join([f"{text} in a pass", *needed.notes, *([reason] if reason else [])])

    def tell(finding: Finding) -> None:
        say({"finding": asdict(finding)})

    return {"findings": [asdict(finding) for finding in check_job(job, site, memory, tell)]}


def _recommend(job: JobSpec, site: Site, request: Mapping[str, Any]) -> dict[str, Any]:
    members = [CandidateWorker(**member) for member in request.get("members") or ()]
    settings = recommend(
        job,
        site,
        request["memory_bytes"],
        request["num_workers"],
        members=None if request.get("members") is None else members,
    )
    return {**settings.document(), "text": str(settings.estimate)}


def _resolve(job: JobSpec, site: Site, request: Mapping[str, Any]) -> dict[str, Any]:
    fleet = Fleet(tuple(CandidateWorker(**member) for member in request["members"]))
    resolved, reason = resolve(job, site, fleet)
    return {"job_json": resolved.canonical_json(), "reason": reason}


def _export(job: JobSpec, site: Site, request: Mapping[str, Any]) -> dict[str, Any]:
    target = Path(request["path"])
    model = trained_model(job, site, Path(request["state"]))
    if request["to"] == "hf":
        write_hf_folder(model, target, request["shard_size"])
        return {"difference": 0.0, "inputs": []}
    without_cache(model)
    write = write_onnx if request["to"] == "onnx" else write_program
    inputs = example_inputs(job, site, model)
    return {"difference": write(model, inputs, target), "inputs": sizes_of(model, inputs)}


_QUESTIONS: Final[Mapping[str, Callable[[JobSpec, Site, Mapping[str, Any]], dict[str, Any]]]] = {
    "estimate": _estimate,
    "export": _export,
    "recommend": _recommend,
    "resolve": _resolve,
}


def _site(request: Mapping[str, Any], bundles: CodeStore) -> Site:
    name = request.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in DEVICES:
        raise InvalidInputError.at("device", not_one_of(name, DEVICES))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError.at(
            "device", f"{name} is not here; leave the device out for this machine's own"
        )
    entrypoints = EntryPoints(request["allow"], request["import_path"])
    if code := request.get("code"):
        bundles.take(code["digest"], "", lambda: b64decode(code["archive"]))
        entrypoints = replace(entrypoints, code=code["digest"])
    return Site(entrypoints, torch.device(name), DataSources())


def _error_values(error: StratagemError) -> dict[str, Any]:
    """Return an error as plain values for JSON."""
    match error:
        case InvalidInputError(violations=violations) if violations:
            return {"violations": [asdict(violation) for violation in violations]}
        case UserCodeError():
            return {
                "type": error.type,
                "message": error.message,
                "traceback": error.traceback,
                "activity": error.activity,
            }
        case _:
            return {"text": str(error)}


def _tell_places(requests: TextIO, say: Say) -> None:
    """Start a thread that reports, for each line of input, the place in user code at which the
    calling thread is, and ends the process when the input ends."""
    activity, ident = per_thread.activity, threading.get_ident()

    def tell() -> None:
        for _ in requests:
            say({"at": activity.text, "place": place_of_thread(ident)})
        os._exit(1)  # nobody waits for the answer, and the user's code may never end

    threading.Thread(target=tell, name="places", daemon=True).start()


def main() -> None:
    """Read one request from standard input, and print the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asking process ends this one
    torch.set_num_threads(default_threads(os.environ))
    requests = os.fdopen(os.dup(sys.stdin.fileno()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    request = json.loads(requests.readline())
    lock = threading.Lock()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(told: Mapping[str, Any]) -> None:
            with lock:
                print(json.dumps(told), file=out, flush=True)

        _tell_places(requests, say)
        try:
            result = {"answer": answer(request, say)}
        except StratagemError as error:
            result = {"error": _error_values(error)}
        say(result)


if __name__ == "__main__":
    main()
