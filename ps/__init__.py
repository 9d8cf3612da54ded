"""Parameter servers: sparse and dense tables on several processes, for trainers of either framework.

Importing this package loads neither numpy nor numba. Read ``spec.py`` (what a table is), ``protocol/messages.py`` (the
messages between Master, pservers and trainers), then ``coordinator/machine.py`` (which pserver holds which bucket) and
``server/bucket_machine.py`` (how a pserver carries that out).
"""
