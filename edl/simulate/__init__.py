"""What a job would lose on a cluster: the Master's machine on virtual time, under faults.

``faults`` draws faults from a seed and ``recorded`` reads them from a file; ``shape`` describes the cluster, the job
and the times that things take; ``scenario`` holds all of them. ``fleet`` answers the Master as launchers would,
``agenda`` orders what happens, and ``virtual`` runs both. The Master's own accounts (``edl.master.goodput``) say what
the slots did; the result is a ``history`` of spells of training. ``accounts`` adds commits and checkpoints to it: it
says what of the training counted. ``advice`` compares settings, ``published`` has the figures of others as scenarios,
``report`` puts results into words, ``loglog`` draws.

Nothing here is part of a running job.
"""
