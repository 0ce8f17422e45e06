"""This package holds the foundations of all parts: errors, identifiers, limits, units and files.

Words that all parts use:
- party: the workers that train one model copy together; parties nest, such as "silo0/replica1", and
  the root party, "", is the whole run
- segment: the steps between two commits
- fact: an event in the journal of a run
- incarnation: one start of a worker process
"""
