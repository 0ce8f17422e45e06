"""Derive the course of a run by pure functions: from its events, in order, and its step history.

- fold: to update a state by the next event; a class named ...Folding does that event by event
- stale update: an update of a federation's client that came after its round had closed
- bench: to leave out for some rounds a client that keeps failing
- lineage: the members of a population that trained a state, generation by generation
"""
