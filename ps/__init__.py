"""Parameter servers: sparse and dense tables on several processes, for trainers of either framework.

Importing this loads neither numpy nor numba. Read ``spec.py`` (what a table is), ``words.py`` (what Master, pservers
and trainers say to each other), then ``machine.py`` (who holds which bucket) and ``holding.py`` (what a pserver does
about it).
"""
