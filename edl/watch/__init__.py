"""Watchdogs: what looks wrong with a job before it fails.

Detectors are pure functions of a snapshot: ``disks`` of one directory, ``job`` of a job's status. ``table`` lists them
with their limits. ``raising`` turns their readings into alarms, each raised once. ``shell`` runs the job's detectors
beside the Master; each launcher runs those of its own disks (``edl.launch.disk_watch``).
"""
