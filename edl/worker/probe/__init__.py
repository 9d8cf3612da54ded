"""The probe of a health check: a process of a node that measures and tests its devices and connections.

``main`` is its course; ``product`` multiplies matrices in numpy or plain Python (``edl.torch.health`` and
``edl.paddle.health`` on the job's framework), ``exchange`` sends data to other nodes and back, ``device_exchanges``
does so between the devices, ``plugins`` calls the user's own probes, ``nvml`` reads the counters of NVIDIA devices.
"""
