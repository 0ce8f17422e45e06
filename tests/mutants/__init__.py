"""Whether `make test` sees defects: one-line changes of the product that must fail a test.

`changes.jsonl` is the fixed list, `areas.py` says which tests look at which part of the product,
`proposals.py` finds changes that the list may grow by. `make mutants` runs it.
"""
