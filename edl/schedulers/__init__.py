"""Adapters for systems that add and remove nodes: Kubernetes, Slurm, PaddleCloud, processes on this host, or any
program. One file each behind one Protocol (``port.py``); ``reconcile.py`` decides, and ``shell.py`` executes its
decisions beside the elected Master."""
