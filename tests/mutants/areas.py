"""Which parts of the product are changed, and which tests of `make test` look at them."""

from dataclasses import dataclass

COORDINATOR = "coordinator/stratagem/coordinator/"
WORKER = "worker/stratagem/worker/"
COMMON = "common/stratagem/common/"
CLIENT = "client/stratagem/client/"


JOURNAL = ("database", "fact_log", "journal", "lead", "schema", "snapshot", "step_history")
VERIFYING = ("verdict", "verified", "verified_run")


@dataclass(frozen=True, slots=True)
class Area:
    """A part of the product."""

    folders: tuple[str, ...]
    """Folders and files; a file belongs to the area that names it most exactly."""
    tests: tuple[str, ...]
    """Files and folders, from the nearest on."""
    is_strict: bool = True
    """No change may survive; else those that do name the tier that sees them."""


AREAS = {
    "core": Area(
        (COORDINATOR + "core/", COORDINATOR + "strategies/"),
        ("tests/coordinator/core", "tests/coordinator/strategies"),
    ),
    "folds": Area(
        (COORDINATOR + "updates/",),
        (
            "tests/coordinator/updates",
            "tests/coordinator/store/test_spool_contract.py",
            "tests/coordinator/effects",
            "tests/coordinator/test_spooled.py",
        ),
    ),
    "reducer": Area(
        (WORKER + "exchange/",),
        ("tests/worker/exchange", "tests/worker/session", "tests/worker/engine"),
    ),
    "codecs": Area(
        (COMMON + "compression/",),
        ("tests/common/compression", "tests/worker/exchange", "tests/coordinator/updates"),
    ),
    "pipeline": Area(
        (COMMON + "pipeline/", WORKER + "pipeline/"),
        ("tests/common/pipeline", "tests/worker/pipeline", "tests/worker/models"),
        is_strict=False,
    ),
    "data order": Area(
        (WORKER + "data/order.py", COMMON + "numerics/"),
        (
            *("tests/worker/data", "tests/common/test_shards.py", "tests/worker/kernels"),
            "tests/common/compression",
            "tests/worker/engine",
        ),
        is_strict=False,
    ),
    "journal": Area(
        tuple(f"{COORDINATOR}store/{name}.py" for name in JOURNAL),
        ("tests/coordinator/store", "tests/coordinator/app/test_summed_up_cluster.py"),
        is_strict=False,
    ),
    "tensors": Area(
        (COMMON + "tensors/",),
        (
            "tests/common/tensors",
            "tests/common/rpc",
            "tests/coordinator/store",
            "tests/coordinator/updates",
        ),
        is_strict=False,
    ),
    "verification": Area(
        (
            *(f"{COORDINATOR}strategies/{name}.py" for name in VERIFYING),
            COMMON + "numerics/verification.py",
            CLIENT + "cli/verify.py",
            CLIENT + "course/claims.py",
            CLIENT + "sdk/verification.py",
            CLIENT + "sdk/verification_plan.py",
        ),
        (
            "tests/client/course/test_claims.py",
            "tests/client/sdk/test_verification.py",
            "tests/client/cli/test_verify_command.py",
            "tests/client/report/test_verified_run.py",
            "tests/coordinator/strategies/test_verified.py",
            "tests/coordinator/strategies/test_verified_at_random.py",
            "tests/coordinator/strategies/test_verified_rounds.py",
        ),
    ),
}


def area_of(path: str) -> str:
    """The name of the area that a file of the product belongs to."""
    folders = ((each, name) for name, area in AREAS.items() for each in area.folders)
    return max((len(each), name) for each, name in folders if path.startswith(each))[1]
