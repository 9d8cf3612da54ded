"""What a job would lose on a cluster: the Master's machine on virtual time, under faults.

``faults`` draws faults from a seed and ``recorded`` reads them from a file; ``shape`` describes the cluster, the job and
the times that things take. ``fleet`` answers the Master as launchers would, and ``virtual`` runs both, event by event. The
Master's own accounts (``edl.master.goodput``) say what the slots did; the result is a ``history`` of spells of training.
``accounts`` adds commits and checkpoints to such a history: it says what of the training counted. ``advice`` compares
settings, ``published`` holds the figures that others have published, ``report`` puts results into words, ``loglog`` draws.

Nothing here is part of a running job.
"""
