"""Facts are journaled and describe everything that can happen to the cluster, a run or a party. A
fact states what was decided or observed and never how to decide it, so replaying a journal needs
no judgement; it holds metadata only: counts, digests, metrics.
"""

from collections.abc import Mapping

from stratagem.common.base.ids import Party
from stratagem.coordinator.core.facts.fact_values import SKIPPED_STEPS as SKIPPED_STEPS
from stratagem.coordinator.core.facts.fact_values import TRAIN_LOSS as TRAIN_LOSS
from stratagem.coordinator.core.facts.fact_values import Capability as Capability
from stratagem.coordinator.core.facts.fact_values import ErrorRecord as ErrorRecord
from stratagem.coordinator.core.facts.fact_values import Member as Member
from stratagem.coordinator.core.facts.fact_values import Metrics as Metrics
from stratagem.coordinator.core.facts.fact_values import Number as Number
from stratagem.coordinator.core.facts.fact_values import PlainValues as PlainValues
from stratagem.coordinator.core.facts.fact_values import Setting as Setting
from stratagem.coordinator.core.facts.fact_values import Value as Value
from stratagem.coordinator.core.facts.federated_facts import Accepted as Accepted
from stratagem.coordinator.core.facts.federated_facts import Assignment as Assignment
from stratagem.coordinator.core.facts.federated_facts import ClientBenched as ClientBenched
from stratagem.coordinator.core.facts.federated_facts import ClientBinding as ClientBinding
from stratagem.coordinator.core.facts.federated_facts import ClientEvaluated as ClientEvaluated
from stratagem.coordinator.core.facts.federated_facts import ClientLeft as ClientLeft
from stratagem.coordinator.core.facts.federated_facts import ClientsAssigned as ClientsAssigned
from stratagem.coordinator.core.facts.federated_facts import ClientsJoined as ClientsJoined
from stratagem.coordinator.core.facts.federated_facts import ClientsSelected as ClientsSelected
from stratagem.coordinator.core.facts.federated_facts import ClientStateLost as ClientStateLost
from stratagem.coordinator.core.facts.federated_facts import Excused as Excused
from stratagem.coordinator.core.facts.federated_facts import KeysPosted as KeysPosted
from stratagem.coordinator.core.facts.federated_facts import LeftOut as LeftOut
from stratagem.coordinator.core.facts.federated_facts import MetricsMerged as MetricsMerged
from stratagem.coordinator.core.facts.federated_facts import RosterFormed as RosterFormed
from stratagem.coordinator.core.facts.federated_facts import RoundAccounted as RoundAccounted
from stratagem.coordinator.core.facts.federated_facts import RoundClosed as RoundClosed
from stratagem.coordinator.core.facts.federated_facts import RoundRestarted as RoundRestarted
from stratagem.coordinator.core.facts.federated_facts import RoundWaits as RoundWaits
from stratagem.coordinator.core.facts.federated_facts import RowsSpent as RowsSpent
from stratagem.coordinator.core.facts.federated_facts import SharesRouted as SharesRouted
from stratagem.coordinator.core.facts.federated_facts import UpdateReceived as UpdateReceived
from stratagem.coordinator.core.facts.federated_facts import UpdateRejected as UpdateRejected
from stratagem.coordinator.core.facts.federated_facts import UpdatesJudged as UpdatesJudged
from stratagem.coordinator.core.facts.run_facts import BlobsHeld as BlobsHeld
from stratagem.coordinator.core.facts.run_facts import BuildFailed as BuildFailed
from stratagem.coordinator.core.facts.run_facts import ClusterSummed as ClusterSummed
from stratagem.coordinator.core.facts.run_facts import CommitUploaded as CommitUploaded
from stratagem.coordinator.core.facts.run_facts import Copied as Copied
from stratagem.coordinator.core.facts.run_facts import DataUploaded as DataUploaded
from stratagem.coordinator.core.facts.run_facts import Evaluated as Evaluated
from stratagem.coordinator.core.facts.run_facts import GenerationClosed as GenerationClosed
from stratagem.coordinator.core.facts.run_facts import KnownWorker as KnownWorker
from stratagem.coordinator.core.facts.run_facts import MemberEvolved as MemberEvolved
from stratagem.coordinator.core.facts.run_facts import MembersFormed as MembersFormed
from stratagem.coordinator.core.facts.run_facts import ModelBuilt as ModelBuilt
from stratagem.coordinator.core.facts.run_facts import Noted as Noted
from stratagem.coordinator.core.facts.run_facts import PartyFailed as PartyFailed
from stratagem.coordinator.core.facts.run_facts import PopulationFormed as PopulationFormed
from stratagem.coordinator.core.facts.run_facts import ProcessDied as ProcessDied
from stratagem.coordinator.core.facts.run_facts import ReplicasDiffer as ReplicasDiffer
from stratagem.coordinator.core.facts.run_facts import RunCancelled as RunCancelled
from stratagem.coordinator.core.facts.run_facts import RunCompleted as RunCompleted
from stratagem.coordinator.core.facts.run_facts import RunDeleted as RunDeleted
from stratagem.coordinator.core.facts.run_facts import RunExpired as RunExpired
from stratagem.coordinator.core.facts.run_facts import RunFailed as RunFailed
from stratagem.coordinator.core.facts.run_facts import RunPinned as RunPinned
from stratagem.coordinator.core.facts.run_facts import RunReleased as RunReleased
from stratagem.coordinator.core.facts.run_facts import RunResumed as RunResumed
from stratagem.coordinator.core.facts.run_facts import RunSubmitted as RunSubmitted
from stratagem.coordinator.core.facts.run_facts import SegmentCommitted as SegmentCommitted
from stratagem.coordinator.core.facts.run_facts import SegmentFinished as SegmentFinished
from stratagem.coordinator.core.facts.run_facts import SegmentRefuted as SegmentRefuted
from stratagem.coordinator.core.facts.run_facts import SegmentVerified as SegmentVerified
from stratagem.coordinator.core.facts.run_facts import SoleCopiesLost as SoleCopiesLost
from stratagem.coordinator.core.facts.run_facts import StoppedEarly as StoppedEarly
from stratagem.coordinator.core.facts.run_facts import UploadDue as UploadDue
from stratagem.coordinator.core.facts.run_facts import VerificationEnded as VerificationEnded
from stratagem.coordinator.core.facts.run_facts import WorkerDraining as WorkerDraining
from stratagem.coordinator.core.facts.run_facts import WorkerLeft as WorkerLeft
from stratagem.coordinator.core.facts.run_facts import WorkerLost as WorkerLost
from stratagem.coordinator.core.facts.run_facts import WorkerMarked as WorkerMarked
from stratagem.coordinator.core.facts.run_facts import WorkerQuarantined as WorkerQuarantined
from stratagem.coordinator.core.facts.run_facts import WorkerRegistered as WorkerRegistered
from stratagem.coordinator.core.facts.run_facts import WorkerReleased as WorkerReleased
from stratagem.coordinator.core.facts.run_facts import WorkersForgotten as WorkersForgotten

ROOT = Party("")

Fact = (
    WorkerRegistered
    | WorkerLost
    | VerificationEnded
    | WorkerDraining
    | WorkerLeft
    | WorkerMarked
    | WorkerQuarantined
    | WorkerReleased
    | WorkersForgotten
    | DataUploaded
    | RunPinned
    | BlobsHeld
    | ClusterSummed
    | RunSubmitted
    | ReplicasDiffer
    | RunCancelled
    | RunResumed
    | RunFailed
    | RunCompleted
    | StoppedEarly
    | RunReleased
    | RunDeleted
    | RunExpired
    | PartyFailed
    | MembersFormed
    | ProcessDied
    | ModelBuilt
    | BuildFailed
    | SegmentFinished
    | SegmentCommitted
    | UploadDue
    | CommitUploaded
    | SegmentRefuted
    | SegmentVerified
    | SoleCopiesLost
    | Evaluated
    | ClientEvaluated
    | MetricsMerged
    | RosterFormed
    | ClientsJoined
    | ClientLeft
    | ClientBenched
    | RoundAccounted
    | ClientsSelected
    | ClientsAssigned
    | ClientStateLost
    | KeysPosted
    | SharesRouted
    | RoundRestarted
    | UpdateReceived
    | UpdateRejected
    | RoundWaits
    | RoundClosed
    | UpdatesJudged
    | Noted
    | PopulationFormed
    | MemberEvolved
    | GenerationClosed
)

KINDS: Mapping[str, type[Fact]] = {kind.__name__: kind for kind in Fact.__args__}
