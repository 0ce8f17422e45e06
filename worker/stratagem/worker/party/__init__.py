"""The party of a run: the workers that train one copy of the model together.

Its members meet in a rendezvous at the coordinator, connect, and agree on one state.
Rank: a member's number in the party. Donor: the member whose state is copied by others.
Segment: the steps between two commits. Base: the committed state from which a plan begins.
"""
