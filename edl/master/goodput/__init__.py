"""Goodput: what the slots of a job spend their time on.

``slot_use`` names the uses and maps the Master's state to them; ``slot_times`` adds them up as the state changes, with
``training_clock`` for what a rollback repeats; ``stored`` keeps the sums for the next Master; ``report`` puts them into
words. ``goodput`` is what the Master's shell calls.
"""
