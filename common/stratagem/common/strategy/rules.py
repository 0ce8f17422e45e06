"""State which parts of a strategy cannot be combined, and why: a table for each strategy, and for
the options of Federated. `common/job/rules.py` has the rules that concern the rest of a job.

The syntax of the rows is described in `common/schema/table.py`. A check that no row can express is
a function. A strategy's fields are read by name, because its class imports this module.
"""

from collections.abc import Iterator
from typing import Any, Final

from stratagem.common.base.errors import Violation
from stratagem.common.schema.rules import differing
from stratagem.common.schema.table import Rules, Table
from stratagem.common.strategy.federated import fewest_updates, too_few
from stratagem.common.strategy.regions import check_members, members_of
from stratagem.common.strategy.secure import against_secure_aggregation, wrong_numbers

# fmt: off

# ---- DataParallel and ModelParallel ----


def check_fragments(strategy: Any) -> Iterator[Violation]:
    """Yield an error if `fragments` do not fit local_steps, the overlap, or ParameterServer."""
    options = strategy.options
    if options.local_steps is None:
        return
    period, rest = divmod(options.local_steps, options.fragments)
    if rest or not period:
        text = f"{options.fragments} does not divide local_steps, {options.local_steps}"
        yield Violation("options.fragments", text)
    elif options.overlap_steps > period:
        text = f"{options.overlap_steps} is more than the {period} steps from one fragment to the "
        yield Violation("options.overlap_steps", f"{text}next, local_steps / fragments")
    elif strategy.aggregation.method == "ParameterServer":
        for name in differing(options, type(options)(), ("fragments", "overlap_steps")):
            text = "ParameterServer sums all parameters in one step; AllReduce has fragments"
            yield Violation(f"options.{name}", text)


DATA_PARALLEL: Final[Table] = (
    Rules("", "{}", {
        "options.min_replicas > num_replicas": "{options.min_replicas} is more than num_replicas, "
        "{num_replicas}",
        "options.all_reduce when no aggregation.method is AllReduce": "{aggregation.method} has "
        "none; AllReduce has",
        "options.consensus_every when no aggregation.method is Decentralized": "{aggregation."
        "method} keeps all replicas equal; Decentralized does not",
        "options.mirror when no options.partition_state": "each worker has the whole state "
        "already; belongs to partition_state: optimizer or full",
    }),
    # Workers that keep slices of one state
    Rules("options.partition_state", "{}", {
        "options.partition_state when no aggregation.method is AllReduce": "{aggregation.method} "
        "brings every sum to every worker; AllReduce leaves slices with them",
        "options.partition_state when options.all_reduce": "{options.all_reduce} all-reduce leaves "
        "no sums with workers; direct does",
        "options.partition_state when options.local_steps": "replicas with local_steps have an "
        "optimizer each, of their own parameters",
    }),
    # Replicas that take local steps
    Rules("no options.local_steps", "has a meaning only together with local_steps", {
        f"options.{name}": ""
        for name in ("outer", "outer_bits", "fragments", "overlap_steps", "mix", "upload_every")
    }),
    Rules("options.local_steps", "{}", {
        "options.local_steps when aggregation.method is Decentralized": "Decentralized joins nodes "
        "after every step; AllReduce and ParameterServer wait",
        "options.all_reduce when aggregation.method is AllReduce": "{options.all_reduce} does not "
        "go together with local_steps; direct does",
    }),
    check_fragments,
)
MODEL_PARALLEL: Final[Table] = (
    Rules("no communication.protocol is Pipeline",
          "belongs to Pipeline only, not to {communication.protocol}", {"options.schedule": ""}),
)

# ---- Options of Federated ----


def check_open_quorum(options: Any) -> Iterator[Violation]:
    """Yield an error if an open roster may have too few clients for the robust rule."""
    roster, fewest = options.open_roster, fewest_updates(options.robust)
    if roster is not None and fewest > roster.min_clients:
        text = f"{roster.min_clients} is less than the {fewest} updates that robust needs"
        yield Violation("roster.min_clients", text)


FEDERATED_OPTIONS: Final[Table] = (
    Rules("", "{}", {
        "no quorum when round_deadline_s": "missing; round_deadline_s says when to settle for it, "
        "for example quorum: 0.5",
        "max_staleness when late_updates is refuse": 'late_updates is "refuse", so no update is '
        "stale; give it a discount",
        "late_updates when robust": "robust compares updates that began from one state, and late "
        "ones did not",
        "late_updates when no robust and no round_deadline_s and no over_select": "no client is "
        "ever late without round_deadline_s or over_select; set one",
        "strikes when on_client_error is fail": 'no client fails twice: on_client_error is "fail"; '
        'use "reject"',
        "ditto when personal": "keeps a whole model at each client already; leave personal or it "
        "out",
        "at roster.open: open_roster and inner": "a silo is several workers, and who joins an open "
        "roster is one; leave one out",
        "quorum > open_roster.min_clients": "{quorum} is more than roster.min_clients, "
        "{open_roster.min_clients}: a round could not close",
    }),
    Rules("inner", "a silo trains on several workers, and what a client keeps lies on one; leave "
          "inner out", {"personal": "", "ditto": "", "control": ""}),
    check_open_quorum,
)

# ---- Federated ----


def check_numbers(strategy: Any) -> Iterator[Violation]:
    """Yield an error if rounds have too few clients for the robust rule or secure aggregation."""
    options, num_selected = strategy.options, strategy.num_selected
    yield from too_few(options.robust, num_selected, options.quorum)
    if options.secure_aggregation is not None:
        yield from against_secure_aggregation(options)
        yield from wrong_numbers(options.secure_aggregation, strategy.num_clients, num_selected)


def check_regions(strategy: Any) -> Iterator[Violation]:
    """Yield an error if a client is in no region, or in two."""
    regions, num_clients = strategy.options.regions, strategy.num_clients
    if regions is None or getattr(strategy.options.inner, "type", "") == "Federated":
        return
    wrong, num_members = [*check_members(regions, num_clients)], len(members_of(regions))
    yield from wrong
    if not wrong and num_members != num_clients:  # of sites: numbers have been counted
        text = f"has {num_members} sites, and num_clients is {num_clients}; name each of them"
        yield Violation("options.regions", text)


_OF_A_REGION: Final = (
    *("local_epochs", "quorum", "round_deadline_s"),
    *("over_select", "on_client_error", "on_missing_quorum"),
)
"""The options that a federation inside a region may set; the other options need each single update,
or all updates at once."""


def check_federations_inside(strategy: Any) -> Iterator[Violation]:
    """Yield an error if the regions are federations with rounds of their own, and their client
    numbers or options are wrong."""
    outer, inner = strategy.options, strategy.options.inner
    if getattr(inner, "type", "") != "Federated":
        return
    if outer.regions is not None:
        if len(outer.regions) != strategy.num_clients:
            text = f"has {len(outer.regions)} regions, and num_clients is {strategy.num_clients}; "
            text += "with a federation as options.inner each region is a client"
            yield Violation("options.regions", text)
        largest = max(map(len, outer.regions.values()))
        if inner.num_clients != largest:
            text = f"{inner.num_clients} is not {largest}, the clients of the largest of the "
            yield Violation("options.inner.num_clients", f"{text}regions")
        yield from check_members(outer.regions, len(members_of(outer.regions)))
    default = type(inner.options)()
    for name in differing(inner.options, default, sorted({*vars(default)} - {*_OF_A_REGION})):
        text = "is not possible in a region, which tells sums of its clients; "
        possible = f"{', '.join(_OF_A_REGION)} are"
        yield Violation(f"options.inner.options.{name}", f"{text}{possible}")
    whole, part = outer.round_deadline_s, inner.options.round_deadline_s
    if whole is not None and part is not None and part * inner.rounds >= whole:
        rounds = f"{inner.rounds} rounds of {part:g} s" if inner.rounds > 1 else f"{part:g} s"
        text = f"{rounds} in a region must be over before its own round, after {whole:g} s"
        yield Violation("options.inner.options.round_deadline_s", text)


_BY_REGION: Final = {
    "options.robust": "a robust rule compares all updates, and a region tells only their sum",
    "options.q": "a client's weight depends on the losses of all others",
    "options.normalize": "how far a round goes depends on the steps of all clients",
    "options.late_updates": "a late update has another base than the sum of its region",
    "options.secure_aggregation": "masks go out of the sum of all clients alone",
}
"""The options that cannot be combined with regions, whether these belong to one federation or are
federations themselves; each with the reason."""

FEDERATED: Final[Table] = (
    Rules("", "{}", {
        "options.quorum > num_clients": "{options.quorum} is more than num_clients, {num_clients}",
        "at options.roster.min_clients: options.open_roster.min_clients > num_clients": "{options."
        "open_roster.min_clients} is more than num_clients, {num_clients}",
        "options.server_learning_rate when no aggregation.method is FedYogi": "{aggregation."
        "method} has no server optimizer; FedYogi has",
        "options.server_optimizer when aggregation.method is FedYogi": "FedYogi is a server "
        "optimizer already; use FedAvg or FedProx",
        "options.over_select when no client_selection.method is Random": "{client_selection."
        "method} leaves no clients to draw more from; Random does",
        "options.late_updates when no client_selection.method is Random": "{client_selection."
        "method} selects the same clients in every round, so no late one is left over; Random does "
        "not",
    }),
    check_numbers,
    # What weighs updates otherwise than by rows; job/rules.py has what it asks of the optimizer.
    Rules("options.q", "is not possible with q{}", {
        "options.server_optimizer": ", which says itself how far a round goes; leave one out",
        "options.robust": ", by which a client has the more say the worse it claims to be",
        "options.late_updates": ": the loss of a late client is that of another state",
        "options.inner": ": a silo does not measure its loss before it trains",
        "options.normalize": ", which takes a change for a gradient as it is; leave one out",
    }),
    Rules("options.q", "is of FedAvg only; the aggregation is {aggregation.method}", {
        "options.q when no aggregation.method is FedAvg": "",
    }),
    Rules("options.normalize", "is not possible with normalize{}", {
        "options.robust": ", by which who claims few steps counts more",
        "options.late_updates": ": how far clients go is a mean over those of a round",
        "options.inner": ": how far a silo goes its own strategy decides",
    }),
    Rules("options.control", "is not possible with control: scaffold{}", {
        "aggregation.mu > 0": ", which takes the term of FedProx for a gradient of the rows; use "
        "FedAvg",
        "options.q": ", in which each client counts as one; leave one out",
        "options.normalize": ", in which each change counts as it is; leave one out",
        "options.robust": ", whose common state is a sum over clients, which one false one leads "
        "anywhere; leave one out",
        "options.personal": ", which is not defined for tensors that are not shared; leave one out",
        "options.ditto": ", which is not defined beside a second model; leave one out",
        "options.late_updates": ": a late update was corrected by the common state of another "
        "round",
        "at options.roster.open: options.open_roster": ", which divides by the number of all "
        "clients; give a fixed roster",
    }),
    # Regions, which may be federations of their own
    check_regions,
    check_federations_inside,
    Rules("options.regions and no options.inner.type is Federated",
          "is not possible with regions: {}", {
        **_BY_REGION,
        "options.control": "the common state of scaffold is that of all clients together",
        "options.personal": "what clients keep to themselves is not defined by region",
        "options.ditto": "what clients keep to themselves is not defined by region",
        "at options.roster.open: options.open_roster": "who joins later is in none",
    }),
    Rules("options.inner.type is Federated", "is not possible with regions: {}", _BY_REGION),
    Rules("options.inner.type is Federated", "{}", {
        "aggregation.method is FedProx": "FedProx changes the steps of clients, and those of this "
        "one are regions; use FedAvg or FedYogi",
        "client_selection.method is ByCapability": "ByCapability needs clients that live on one "
        "worker; use All or Random",
        "options.local_epochs": "is of clients that train, which are those of options.inner; set "
        "it there",
        "options.strikes": "is of single clients, and these are regions",
        "options.on_missing_quorum": "a region that has failed is not asked again in its round; "
        'use "fail"',
        "options.inner.aggregation.method is not FedAvg": "{options.inner.aggregation.method} "
        "makes no sum of clients; in a region use FedAvg",
        "options.inner.client_selection.method is ByCapability": "in a region use All or Random",
    }),
)
# fmt: on
