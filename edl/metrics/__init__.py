"""The metrics of a job and of a node for Prometheus.

``job`` and ``node`` are the tables of all metrics: name, kind, help, labels, and a function that reads the values from
``facts``. ``exposition`` writes them in a format that Prometheus reads; only it imports ``prometheus_client``.
``python -m edl.metrics`` writes the tables of docs/metrics.md.
"""
