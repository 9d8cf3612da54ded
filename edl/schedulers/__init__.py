"""What gives and takes machines: Kubernetes, Slurm, PaddleCloud, this host, or any program. One file each behind one
Protocol (``port.py``); ``reconcile.py`` decides, ``shell.py`` carries out beside the ruling Master."""
