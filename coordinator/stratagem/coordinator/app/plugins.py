"""Find the strategies of this coordinator: the built-in ones and those of other packages.

No other module of the coordinator imports code of other packages. The result is a value, made once
at the start; a package that is installed later counts from the next start on.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import structlog

from stratagem.common.base.errors import told
from stratagem.coordinator.core.strategy_contract import (
    EVALUATION,
    GROUP,
    REGIONAL,
    SCHEDULED,
    SILOS,
    VERIFIED,
    VERSION,
    Strategies,
    Strategy,
)
from stratagem.coordinator.strategies import verified
from stratagem.coordinator.strategies.federated import regions, silos
from stratagem.coordinator.strategies.federated import strategy as federated
from stratagem.coordinator.strategies.population import scheduled
from stratagem.coordinator.strategies.population import strategy as population
from stratagem.coordinator.strategies.synchronous import data_parallel, evaluation, local, pipelines

BUILT_IN = Strategies(
    {
        "DataParallel": data_parallel.STRATEGY,
        "Federated": federated.STRATEGY,
        "Local": local.STRATEGY,
        "ModelParallel": pipelines.STRATEGY,
        "PopulationBased": population.STRATEGY,
        EVALUATION: evaluation.STRATEGY,
        REGIONAL: regions.STRATEGY,
        SCHEDULED: scheduled.STRATEGY,
        SILOS: silos.STRATEGY,
        VERIFIED: verified.STRATEGY,
    }
)

log = structlog.get_logger()


@cache
def installed() -> Strategies:
    """Return the built-in strategies and those registered by packages of this environment."""
    return with_plugins(entry_points(group=GROUP))


def with_plugins(points: Iterable[EntryPoint]) -> Strategies:
    """Return the built-in strategies and those of the entry points; of several with the same name,
    the first counts."""
    loaded: dict[str, Strategy] = {}
    broken: dict[str, str] = {}
    for point in points:
        if point.name in loaded or point.name in BUILT_IN.built_in:
            continue
        try:
            strategy = point.load()
        except (Exception, SystemExit) as error:  # code of another package
            broken[point.name] = f"{point.name!r} cannot be imported: {told(error)}"
        else:
            if isinstance(strategy, Strategy) and strategy.version == VERSION:
                loaded[point.name] = strategy
            else:
                broken[point.name] = _why_refused(point, strategy)
        if point.name in broken:
            log.warning("strategy left out", reason=broken[point.name])
    return Strategies(BUILT_IN.built_in, loaded, broken)


def _why_refused(point: EntryPoint, strategy: object) -> str:
    """Return why a registered object is not a usable strategy: its type, or its version of the
    contract. A strategy of version 1 is a module, or an object, with functions as attributes."""
    version = getattr(strategy, "version", 1 if hasattr(strategy, "decide") else None)
    what = "is no strategy" if version is None else f"has version {version} of the contract"
    return (
        f"{point.name!r} ({point.value}) {what}; allowed is version {VERSION}: a Strategy of "
        "stratagem.coordinator.core.strategy_contract"
    )
