"""The denylist: hosts and devices that no job uses, remembered from one job to the next.

``places``: where it is kept. ``plan``: what a running job adds and removes (pure). ``shell``: runs beside the elected
Master. The Master keeps the slots that the entries concern out of its worlds (``edl.master.denylist``).
"""
