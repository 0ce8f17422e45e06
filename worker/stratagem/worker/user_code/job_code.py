"""The one way from a job to the functions that it names, whether installed or brought along.

Asks the operator's policy before anything of a bundle is fetched, unpacked or imported, and whether
what the job requires is installed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.worker.user_code.code_policy import CodePolicy
from stratagem.worker.user_code.code_store import CodeStore
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class SiteCode:
    """What the file of a site has admitted of a job: its bundle, if it has one, and patterns of
    installed entry points."""

    site: str
    entrypoints: tuple[str, ...]


class UserCode:
    """What the user's code may be on this worker: installed entry points, and bundles."""

    def __init__(self, installed: EntryPoints, policy: CodePolicy, bundles: CodeStore) -> None:
        self._installed, self._policy, self.bundles = installed, policy, bundles

    def entry_points_of(
        self,
        job: JobSpec,
        run_id: str,
        fetch: Callable[[str], bytes],
        allowed: SiteCode | None = None,
    ) -> EntryPoints:
        """Return what resolves all entry points of a job; its bundle is here then.

        fetch: gives the archive of a digest. allowed: what a site's file has admitted, in place of
        the operator's list and policy. Raises InvalidInputError where the policy of this
        worker refuses the bundle, or what the job requires is not installed.
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
    """Raise InvalidInputError, naming all that lack, unless what the job requires is installed."""
    lacking = [text for text in map(_lack, job.requires or ()) if text]
    if lacking:
        text = f"this worker lacks {', '.join(lacking)}: install that in the image of the workers"
        raise InvalidInputError.at("requires", text)


def _lack(text: str) -> str:
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return text
    fits = requirement.specifier.contains(installed, prereleases=True)
    return "" if fits else f"{text} (has {installed})"
