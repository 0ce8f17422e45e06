"""The pictures of a population: lineage, scores, and hyperparameters against the score."""

from stratagem.client.course.population import Population
from stratagem.client.pictures.lineage import LineageNode, lineage
from stratagem.client.pictures.parallel_axes import Trial, parallel_axes
from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.scores import scores
from stratagem.client.report.panel import Panel
from stratagem.client.report.run_values import ReportedRun
from stratagem.common.base.text import values_text


def population_panels(run: ReportedRun, path: str = "") -> list[Panel]:
    """Return lineage, scores, and hyperparameters against the score, of the whole run or of a
    population inside it."""
    folding = run.course.populations.get(path)
    found = None if folding is None else folding.population
    if found is None or not found.generations:
        return []
    nodes, best = _nodes(found), found.best
    by_generation = [
        [each.score if (each := generation.of(m)) else None for m in range(_size(found))]
        for generation in found.generations
        if any(member.is_scored for member in generation.members)
    ]
    said = "" if best is None else str(best)
    trials, names = _trials(found)
    space = (run.job.get("search_space") or {}).get("dimensions") or ()
    log = {each["name"] for each in space if each.get("scale") == "Log"}
    is_min = found.mode == "min"

    def lineage_of(width: int) -> Picture:
        return lineage(nodes, title="Lineage", best=said, less_is_better=is_min, width=width)

    def scores_of(width: int) -> Picture:
        metric = found.metric
        return scores(
            by_generation, title="Scores", metric=metric, less_is_better=is_min, width=width
        )

    def axes_of(width: int) -> Picture:
        return parallel_axes(names, trials, title="Hyperparameters", log=log, width=width)

    note = f"Best: {said}." if said else ""
    panels = [Panel("lineage", "Lineage", lineage_of, note), Panel("scores", "Scores", scores_of)]
    return [*panels, Panel("hyperparameters", "Hyperparameters", axes_of)] if trials else panels


def _size(found: Population) -> int:
    return max(len(generation.members) for generation in found.generations)


def _nodes(found: Population) -> list[LineageNode]:
    best = found.best
    winner = None if best is None else found.generations[best.generation - 1].of(best.member)
    past = {(each.generation, each.member) for each in winner.past} if winner else set()
    return [
        LineageNode(
            *(each.member, generation.number, each.parent, each.score),
            values_text(each.params),
            (generation.number, each.member) in past,
        )
        for generation in found.generations
        for each in generation.members
    ]


def _trials(found: Population) -> tuple[list[Trial], list[str]]:
    """Return the members of the newest generation with scores, or that of the winner."""
    scored = [g for g in found.generations if any(m.score is not None for m in g.members)]
    if not scored:
        return [], []
    best = found.best
    newest = scored[-1] if best is None else found.generations[best.generation - 1]
    names = list(dict.fromkeys(name for each in newest.members for name in each.params))
    trials = [
        Trial(
            f"member {each.member}",
            {**each.params, **({} if each.score is None else {found.metric: each.score})},
            best is not None and each.member == best.member,
        )
        for each in newest.members
    ]
    return trials, [*names, found.metric]
