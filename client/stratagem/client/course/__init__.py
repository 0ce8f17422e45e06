"""Derive the course of a run by pure functions: from its events, in order, and its step history.

- to fold an event: to update a state by it; a class named ...Folding is fed event by event - stale
update: an update of a federation's client that came after its round had closed - to bench a client:
to leave it out for some rounds, because it keeps failing - lineage: the members of a population
that trained a state, generation by generation
"""
