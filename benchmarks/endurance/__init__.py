"""Injects faults into a job every few seconds for an hour, on a small disk and with few descriptors, to find what
grows."""
