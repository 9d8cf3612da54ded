"""Health checks of nodes: a matrix product on each device and an exchange of data with other nodes.

``plan`` decides who exchanges data with whom and what the results mean; ``signs`` which failures look like defective
hardware; ``readings`` what a device's counters mean. All three are pure. ``probe`` is the process that measures one
node, with ``product`` (in Python or numpy; ``edl.torch.health`` and ``edl.paddle.health`` on the job's framework),
``exchange`` (TCP) and ``nvml`` (counters of NVIDIA devices).
"""
