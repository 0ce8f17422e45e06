"""Which jobs come by which failpoint, and how often."""

SYNCHRONOUS = ("Local", "AllReduce", "ParameterServer")
EXCHANGING = ("AllReduce", "ParameterServer")
ALL = (*SYNCHRONOUS, "FedAvg")
NESTED = (*SYNCHRONOUS, "Population", "Silos")
WITH_PHASES = ("Phases", "Phases-server")
WITH_TURNS = ("Turns", "Turns-clients", "Turns-population")
WITH_LOCAL_STEPS = ("DiLoCo", "DiLoCo-server", "DiLoCo-streaming")
SOLE_COPIES = ("Gossip", "Pipeline", "Slices", "Full", *WITH_LOCAL_STEPS)
"""Return to the last commit; so does Coded."""
EACH_KIND_OF_THEM = ("Gossip", "Pipeline", "DiLoCo-streaming")
"""The jobs with local steps differ in their exchange alone."""
REACHED_BY = {
    "coordinator.push.begun": ALL,
    "coordinator.build.pulled": ALL,
    "coordinator.segment.trained": (*NESTED, *EACH_KIND_OF_THEM, "Verified"),
    "coordinator.snapshot.copied": ("Frozen",),
    "coordinator.commit.pulled": (
        *NESTED,
        *EACH_KIND_OF_THEM,
        "Slices",
        "Mirrors",
        "Full-mirrors",
        "DiLoCo",
        "Turns",
        "Scheduled",
        "Verified",
    ),
    "coordinator.upload.merged": ("DiLoCo-stopped",),
    "coordinator.step.summed": ("ParameterServer", "Coded", "DiLoCo-server", "Pipelines-server"),
    "coordinator.round.pulled": ("FedAvg", "Scaffold"),
    "coordinator.silo.collected": ("Silos", "Silo-pipelines"),
    "coordinator.region.summed": ("Regions-nested",),
    "coordinator.round.judged": ("Krum", "Fair"),
    "coordinator.round.folded": (
        "FedAvg",
        "FedAvg-coded",
        "FedYogi",
        "Median",
        "Krum",
        "Nova",
        "OpenRoster",
        "Private",
        "Regions",
        "Regions-nested",
    ),
    "coordinator.privacy.accounted": ("Private",),
    "coordinator.secure.keys_gathered": ("Secure",),
    "coordinator.secure.shares_gathered": ("Secure",),
    "coordinator.secure.signed": ("Secure",),
    "coordinator.secure.opened": ("Secure",),
    "coordinator.evaluation.gathered": ("Evaluation", "FedAvg"),
    "coordinator.outputs.gathered": ("Evaluation", "AllReduce"),
    "coordinator.run.released": ALL,
    "coordinator.journal.before_commit": (*ALL, "Population", "Verified"),
    "coordinator.journal.after_commit": (*ALL, "Population", "Scheduled", "Verified"),
    "coordinator.history.merging": ("AllReduce", "Gossip", "Silos"),
    "coordinator.blobs.before_rename": (*ALL, "FedYogi"),
    "coordinator.blobs.after_rename": (*ALL, "FedYogi", "Regions"),
    "coordinator.spool.after_checkpoint": ("FedAvg-large",),
    "coordinator.spool.before_rename": ("FedAvg", "FedAvg-coded"),
    "coordinator.spool.after_rename": ("FedAvg", "FedAvg-coded"),
    "coordinator.spool.before_delete": ("FedAvg",),
    "coordinator.fold.after_window": (
        *("FedAvg", "FedAvg-coded", "FedAvg-large", "FedYogi", "Median", "Krum", "Private"),
        "Regions",
        "Regions-nested",
    ),
    "worker.step.before_backward": (*SYNCHRONOUS, "Mirrors", "Full-mirrors"),
    "worker.step.before_apply": (*SYNCHRONOUS, "Coded", "Mirrors", "Full-mirrors"),
    "worker.step.after_apply": (*NESTED, "Coded", "Scheduled", "Mirrors", "Full-mirrors"),
    "worker.slices.updated": ("Slices", "Mirrors"),
    "worker.parameters.gathered": ("Full", "Full-mirrors"),
    "worker.parameters.updated": ("Full", "Full-mirrors"),
    "worker.turns.after_turn": WITH_TURNS,
    "worker.phases.predicted": WITH_PHASES,
    "worker.gossip.loaded": ("Gossip",),
    "worker.local_step.before_backward": ("Gossip", *WITH_LOCAL_STEPS),
    "worker.replicas.loaded": WITH_LOCAL_STEPS,
    "worker.replicas.kept": WITH_LOCAL_STEPS,
    "worker.outer_step.before_exchange": WITH_LOCAL_STEPS,
    "worker.outer_step.applied": WITH_LOCAL_STEPS,
    "worker.gossip.before_mix": ("Gossip",),
    "worker.gossip.mixing": ("Gossip",),
    "worker.gossip.after_mix": ("Gossip",),
    "worker.stages.joined": ("Pipeline",),
    "worker.stages.loaded": ("Pipeline", "Silo-pipelines"),
    "worker.stages.before_backward": ("Pipeline", "Pipelines", "Pipelines-server"),
    "worker.stages.before_apply": ("Pipeline", "Pipelines-server"),
    "worker.stages.after_apply": ("Pipeline", "Silo-pipelines"),
    "worker.batch.evaluated": ("Evaluation", "FedAvg"),
    "worker.metrics.measured": ("Evaluation", "AllReduce"),
    "worker.evaluation.shown": ("Stopped", "FedAvg"),
    "worker.client_round.after_training": ("FedAvg", "Rows"),
    "worker.secure.keys_made": ("Secure",),
    "worker.secure.update_kept": ("Secure",),
    "worker.secure.opening_kept": ("Secure",),
    "worker.secure.answered": ("Secure",),
    "worker.execute.accepted": ("Local", "AllReduce", "FedAvg", "ParameterServer"),
    "worker.blob.committed": ALL,
    "worker.build.done": ALL,
    "worker.rendezvous.answered": (*EXCHANGING, *EACH_KIND_OF_THEM),
    "worker.rendezvous.joined": (
        *SYNCHRONOUS,
        "Gossip",
        *WITH_LOCAL_STEPS,
        "Mirrors",
        "Full-mirrors",
    ),
    "worker.state.received": (*SYNCHRONOUS, "Verified"),
    "worker.segment.finished": (
        *NESTED,
        *EACH_KIND_OF_THEM,
        "Mirrors",
        "Full-mirrors",
        "Verified",
    ),
    "worker.snapshot.taken": (
        *NESTED,
        *EACH_KIND_OF_THEM,
        "Turns",
        "Mirrors",
        "Full",
        "Full-mirrors",
        "Verified",
    ),
    "worker.snapshot.compared": ("Frozen",),
    "worker.snapshot.asked": ("AllReduce", "Gossip", "Slices", "Mirrors", "Full-mirrors"),
    "worker.round.trained": (
        *("FedAvg", "OpenRoster", "Private", "Rows", "Regions", "Regions-nested"),
    ),
}
AFTER_ANOTHER = {
    "coordinator.replay.done": (
        ("coordinator", "coordinator.journal.after_commit", "coordinator"),
        ("AllReduce",),
    ),
    "worker.mirror.offered": (
        ("worker-2", "worker.step.before_apply", "worker-0"),
        ("Full-mirrors",),
    ),
}
"""Reached only after another crash: of this process, at that failpoint; then by this process, under
these jobs."""
OVER_AN_OBJECT_STORE = {"coordinator.objects.after_part", "coordinator.objects.after_put"}
"""Not reached where blobs lie in a folder; see test_object_store.py."""
ONCE_PER_BUNDLE = {"worker.code.unpacked"}
"""Reached where code is new to a worker; see test_brought_code.py."""
ONLY_AT_A_SITE = {
    "worker.audit.before_line",
    "worker.audit.within_line",
    "worker.audit.after_line",
}
"""Reached by workers with a file of their own; see test_audit.py."""
BY_WORKERS_THEMSELVES = {
    "coordinator.parts.described",
    "coordinator.leaves.gathered",
    "worker.pieces.asked",
    "worker.leaf.joined",
    "worker.leaf.unnamed",
    "worker.leaf.untold",
    "worker.leaf.half_sent",
    "worker.leaf.stored",
}
"""Reached where workers write states into a folder or an object store; see
test_direct_states.py."""
WITH_CLIENT_STATE = {
    "worker.client_state.before_sync",
    "worker.client_state.after_sync",
}
"""Reached by workers whose clients keep something to themselves; see test_client_states.py."""
WITH_MERGED_METRICS = {
    "coordinator.sums.merged",
    "worker.sums.measured",
}
"""Reached where sites say the states of metrics; see test_client_states.py."""
LATER_HITS = {
    "coordinator.segment.trained": (3,),
    "coordinator.commit.pulled": (2,),
    "coordinator.step.summed": (1, 7),
    "coordinator.round.pulled": (1, 4),
    "coordinator.round.judged": (1,),
    "coordinator.round.folded": (1,),
    "coordinator.privacy.accounted": (1,),
    "coordinator.journal.before_commit": (1, 2, 4, 7),
    "coordinator.journal.after_commit": (1, 2, 4, 7),
    "coordinator.blobs.before_rename": (2,),
    "coordinator.blobs.after_rename": (2,),
    "coordinator.spool.after_rename": (2,),
    "worker.step.before_backward": (1, 6),
    "worker.step.before_apply": (1, 5),
    "worker.step.after_apply": (1, 11),
    "worker.slices.updated": (5, 8),
    "worker.parameters.gathered": (1, 30),
    "worker.parameters.updated": (5, 8),
    "worker.turns.after_turn": (1, 7),
    "worker.phases.predicted": (5,),
    "worker.local_step.before_backward": (6,),
    "worker.gossip.before_mix": (5,),
    "worker.gossip.mixing": (9,),
    "worker.gossip.after_mix": (11,),
    "worker.replicas.kept": (3,),
    "worker.outer_step.before_exchange": (1,),
    "worker.outer_step.applied": (2,),
    "worker.stages.before_backward": (1, 6),
    "worker.stages.before_apply": (1, 5),
    "worker.stages.after_apply": (11,),
    "worker.batch.evaluated": (1,),
    "worker.client_round.after_training": (1,),
    "worker.secure.answered": (3,),
    "worker.execute.accepted": (2,),
    "worker.segment.finished": (4,),
    "worker.snapshot.taken": (5,),
    "worker.snapshot.asked": (1, 3),
    "worker.round.trained": (1, 2),
}
"""Other hits than the first: the second step, a later segment, the second round."""
