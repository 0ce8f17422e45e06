"""The decisions of the coordinator, as values and pure functions.

    command --decide--> facts --(journal)--> apply --> state --pending--> effects

Rules: nothing in this package awaits, reads a clock, draws at random, touches a tensor or knows of
gRPC. Time and ids are arguments. What stands in the journal are facts, so that newer code replays
old journals unchanged.
"""
