"""Parameter servers: sparse and dense tables on several processes, for trainers of either framework.

Importing this loads neither numpy nor numba. Read ``spec.py`` (what a table is), ``protocol/messages.py`` (what Master,
pservers and trainers say to each other), then ``coordinator/machine.py`` (who holds which bucket) and
``server/bucket_machine.py`` (what a pserver does about it).
"""
