"""One session of a run on a worker: its context, control, states and outgoing messages.

Plan: the coordinator's order to a session, such as to train to a step; an execution runs it.
Segment: the steps between two commits. Snapshot: the state at the end of a segment.
Membership: the number of a party's composition; it rises whenever its members change.
View: a party at one membership, with the shards of each member.
Lineage: a number that rises whenever the run returns to an earlier commit.
"""
