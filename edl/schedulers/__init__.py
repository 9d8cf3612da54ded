"""Adapters for systems that add and remove nodes: Kubernetes, Slurm, PaddleCloud, processes on this host, or the user's
own program. Each implements the Protocol in ``port.py``; ``reconcile.py`` decides what to ask of it, and ``shell.py``
executes these decisions beside the elected Master."""
