"""Commits of a worker whose backend is asynchronous, under faults at any instruction.

``python -m edl.testing.commits`` plays schedules of them.
"""
