"""Find the user's code by name, and mark the places where it runs.

The operator's allow list determines the names that may be imported; it is checked before any
import. Every exception of the user's code is translated here into `UserCodeError`.
"""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

import stratagem
from stratagem.common.base.errors import (
    InvalidInputError,
    RefusedBySiteError,
    StratagemError,
    UserCodeError,
    Violation,
    leaves,
    told,
)
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import suggest, thawed
from stratagem.worker.host.stalls import per_thread
from stratagem.worker.user_code import bundles
from stratagem.worker.user_code.bundles import CodePolicy, CodeStore
from stratagem.worker.user_code.watching import see_modules

# ---- Entry points ----

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TORCH: Final = str(Path(torch.__file__).parent)
_MODULE_CALLS: Final = (torch.nn.modules.module.__file__, f"{_TORCH}/_")
"""Files whose frames lie between a module's call and its forward, or inside torch."""


@dataclass(frozen=True)
class EntryPoints:
    """The entry points that may be used: names or fnmatch patterns over "package.module:name".

    import_paths: folders with user modules, searched after the rest of sys.path, so that installed
    modules win. code: digest of the job's bundle, which is searched first and allowed completely.
    site: the site whose file has the list.
    """

    allow: Sequence[str]
    import_paths: Sequence[str | Path] = ()
    code: str = ""
    site: str = ""

    def __post_init__(self) -> None:
        for path in map(str, self.import_paths):
            if path not in sys.path:
                sys.path.append(path)

    def resolve(self, name: str, field: str = "entrypoint") -> Callable[..., Any]:
        """Return the callable of this name; refuse a name that is not allowed before any import."""
        if not _NAME.fullmatch(name):
            raise _refusal(field, name, 'is not of the form "package.module:name"')
        module_name, _, qualname = name.partition(":")
        if "__" in qualname:
            raise _refusal(field, name, "names a private attribute")
        is_brought = self._brings(module_name)
        if not (is_brought or self._allows(name)):
            raise self._not_allowed(field, name)
        target = _walk(self.import_allowed(module_name, field, name), qualname, field, name)
        if isinstance(target, ModuleType) or not callable(target):
            raise _refusal(field, name, f"is a {type(target).__name__}, which cannot be called")
        return target if is_brought else self._checked(name, target, field)

    def bind(self, name: str, kwargs: Mapping[str, Any], field: str) -> Callable[..., Any]:
        """Return the callable of this name with keyword arguments bound. Raises InvalidInputError
        for a keyword that the callable does not take."""
        target = self.resolve(name, f"{field}.entrypoint")
        _check_keywords(target, name, kwargs, f"{field}.kwargs")
        if any(isinstance(value, Mapping | list) for value in kwargs.values()):
            return _Bound(target, kwargs)
        return partial(target, **kwargs) if kwargs else target

    def import_allowed(self, module_name: str, field: str, name: str) -> ModuleType:
        """Import the module of an allowed entry point. Raises InvalidInputError if there is no such
        module, UserCodeError if its code fails."""
        with user_code(f"importing {module_name}"):
            try:
                if self._brings(module_name):
                    return bundles.import_module(self.code, module_name)
                module = importlib.import_module(module_name)
                see_modules(self.import_paths)
                return module
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if module_name == missing or module_name.startswith(f"{missing}."):
                    reason = f'cannot be found: no module "{missing}" {self._looked_in()}'
                    raise _refusal(field, name, reason) from error
                raise

    def _brings(self, module_name: str) -> bool:
        return self.code != "" and bundles.has_module(self.code, module_name)

    def _looked_in(self) -> str:
        places = [*(["the job's code"] if self.code else []), *map(str, self.import_paths)]
        return f"is installed, or is in {' or '.join(places)}" if places else "is installed"

    def _allows(self, name: str) -> bool:
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.allow)

    def _checked(self, name: str, target: Callable[..., Any], field: str) -> Callable[..., Any]:
        """Refuse an object that the module has only imported from a place that is not allowed,
        unless the operator has listed exactly this name."""
        if name in self.allow:
            return target
        home = getattr(target, "__module__", None)
        if home == name.partition(":")[0]:
            return target
        own_name = f"{home}:{getattr(target, '__qualname__', type(target).__qualname__)}"
        if not self._allows(own_name):
            if self.site:
                raise self._not_allowed(field, own_name)
            raise _refusal(field, name, f"is really {own_name}, which this worker does not allow")
        return target

    def _not_allowed(self, field: str, name: str) -> StratagemError:
        allowed = ", ".join(self.allow) or "nothing"
        if self.site:
            text = f'entrypoints: {field} "{name}" is not one of {allowed}'
            return RefusedBySiteError(f"site {self.site} refuses: {text}")
        return _refusal(field, name, f"is not allowed on this worker, which allows: {allowed}")


@dataclass(frozen=True)
class _Bound:
    """A partial call with new copies of lists and dicts, since the callee may change them."""

    target: Callable[..., Any]
    kwargs: Mapping[str, Any]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(self.target, **self.kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **{**thawed(self.kwargs), **kwargs})


def _check_keywords(
    target: Callable[..., Any], name: str, kwargs: Mapping[str, Any], field: str
) -> None:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # a function without Python code checks its arguments itself
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [e.name for e in parameters if e.kind in (e.POSITIONAL_OR_KEYWORD, e.KEYWORD_ONLY)]
    violations = [
        Violation(
            f"{field}.{key}",
            f'{value!r}, but "{name}" takes no {key!r}{suggest(key, names)}; '
            f"it takes {', '.join(names) or 'nothing'}",
        )
        for key, value in kwargs.items()
        if key not in names
    ]
    if violations:
        raise InvalidInputError(violations=violations)


def _refusal(field: str, name: str, reason: str) -> InvalidInputError:
    return InvalidInputError.at(field, f'"{name}" {reason}')


def _walk(module: ModuleType, qualname: str, field: str, name: str) -> object:
    target: object = module
    for part in qualname.split("."):
        if isinstance(target, ModuleType) and target is not module:
            raise _refusal(field, name, "reaches through a module that it imported")
        holder, target = target, getattr(target, part, None)
        if target is None:
            names = [attribute for attribute in dir(holder) if not attribute.startswith("_")]
            reason = f'cannot be found: no attribute "{part}"{suggest(part, names)}'
            raise _refusal(field, name, reason)
    return target


class user_code:  # reads as a statement
    """A context for the user's code: its errors become a `UserCodeError`, and observers of this
    thread see the activity.

    Everything is caught on purpose, `sys.exit()` too, at this border between our program and the
    user's. Our own errors, raised by callbacks inside it, pass through. It is a class, because each
    step enters it several times.
    """

    __slots__ = ("_activity", "_here", "_outer")

    def __init__(self, activity: str) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        here = self._here = per_thread.activity
        self._outer, here.text = here.text, self._activity
        here.num_moves += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        here = self._here
        here.text = self._outer
        here.num_moves += 1
        if isinstance(error, StratagemError) or not isinstance(error, Exception | SystemExit):
            return
        raise user_error(error, self._activity) from error


def user_error(error: BaseException, activity: str) -> UserCodeError:
    """Return the error for reports: type and message with notes, and the traceback of the user's
    frames; if there are none, of torch's frames without module calls."""
    told_trace = traceback.TracebackException.from_exception(error)
    _keep_users_part(told_trace)
    first, *others = leaves(error)
    kind = type(first)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    notes = getattr(first, "__notes__", ())
    text = "; ".join([str(first), *map(str, notes), *map(told, others)])
    return UserCodeError(name, text, "".join(told_trace.format()), activity=activity)


def _keep_users_part(told_trace: traceback.TracebackException) -> None:
    """Remove frames of Stratagem from the traceback, and those of torch if others remain; also in
    causes."""
    behind = (told_trace.__cause__, told_trace.__context__, *(told_trace.exceptions or ()))
    for cause in behind:
        if cause is not None:
            _keep_users_part(cause)
    others = [frame for frame in told_trace.stack if not _is_ours(frame.filename)]
    users = [frame for frame in others if is_users(frame.filename)]
    for frame in users:
        _ = frame.line  # read the line from its file before the path is shortened
        frame.filename = bundles.plain_path(frame.filename)
    told_trace.stack = traceback.StackSummary.from_list(
        users or [frame for frame in others if not frame.filename.startswith(_MODULE_CALLS)]
    )


def is_users(filename: str) -> bool:
    """Return whether a file belongs to neither Stratagem nor torch."""
    return not (_is_ours(filename) or filename.startswith(_TORCH))


def _is_ours(filename: str) -> bool:
    return filename.startswith((*stratagem.__path__, "<frozen")) or filename.endswith(
        ("contextlib.py", "importlib/__init__.py")
    )


# ---- Code of a job ----
#
# A job's functions, installed or in a bundle, are found through `UserCode`. It checks the
# operator's policy before it fetches, unpacks or imports anything of a bundle, and checks that the
# requirements of the job are installed here.


@dataclass(frozen=True, slots=True)
class SiteCode:
    """The code that a site's file allows for a job: its bundle, if any, and patterns of installed
    entry points."""

    site: str
    entrypoints: tuple[str, ...]


class UserCode:
    """The user's code that this worker may run: installed entry points, and bundles."""

    def __init__(self, installed: EntryPoints, policy: CodePolicy, bundles: CodeStore) -> None:
        self._installed, self._policy, self.bundles = installed, policy, bundles

    def entry_points_of(
        self,
        job: JobSpec,
        run_id: str,
        fetch: Callable[[str], bytes],
        allowed: SiteCode | None = None,
    ) -> EntryPoints:
        """Return the entry points of a job, after fetching its bundle.

        fetch: returns the archive of a digest. allowed: the code that a site's file allows, instead
        of the operator's list and policy. Raises InvalidInputError if this worker's policy refuses
        the bundle, or a requirement is not installed.
        """
        check_requirements(job)
        installed = self._installed
        if allowed is not None:
            installed = replace(installed, allow=allowed.entrypoints, site=allowed.site)
        if job.code is None or job.code.digest is None:
            return installed
        if allowed is None:
            self._policy.admit(job.code)
        digest = job.code.digest
        self.bundles.take(digest, run_id, lambda: fetch(digest))
        return replace(installed, code=digest)


def check_requirements(job: JobSpec) -> None:
    """Raise InvalidInputError that lists the job's requirements which are not installed."""
    lacking = [text for text in map(_lack, job.requires or ()) if text]
    if lacking:
        text = f"this worker lacks {', '.join(lacking)}: install that in the image of the workers"
        raise InvalidInputError.at("requires", text)


def _lack(text: str) -> str:
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return text
    fits = requirement.specifier.contains(installed, prereleases=True)
    return "" if fits else f"{text} (has {installed})"
