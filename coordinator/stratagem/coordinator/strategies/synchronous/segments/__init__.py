"""The life cycle of a party that trains synchronously, shared by the strategies that do.

Members are formed, one of them builds the model, and then segment after segment is trained by all
members together and committed while the next one already runs.

When a member is lost, what each member holds decides what follows (`SegmentRules`). Where all hold
the same, the survivors continue inside the open segment, from the newest state that any of them
holds; when all are lost the party returns to its last commit. Where each member holds what no other
has (a sole copy), any change of members returns the party to its last commit.

    synchronous_run.py        the run value and the fold of facts into it
    party_decisions.py        who belongs to the party, and when it ends
    due_effects.py            the effects that are due
    party_views.py            what others ask of a party
    synchronous_strategy.py   all of it as one strategy, made from a check and segment rules
"""
