"""Goodput: what the slots of a job spend their time on.

``slot_use`` names the uses and maps the Master's state to them, ``ledger`` adds up slot-seconds as the state changes,
``progress`` estimates how much training a rollback repeats, ``report`` puts results into words.
"""
