"""Imported by a forker: pservers and trainers that are forked have the compiled kernels loaded, which takes most of a
second. Without a cache of them there is nothing to load, and they take their own way."""

from ps.store.kernels import chosen, kernels
from ps.store.kernels.ready import ready

if chosen() == "numba" and ready():
    kernels().warm()
