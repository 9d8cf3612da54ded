"""Says which signals come, and ends on the last one that it is told to wait for: ``SCRIPT USR1 USR2``. Its local rank 1
handles none of the first ones."""

import os
import signal
import sys
import time

*handled, last = (signal.Signals[f"SIG{name}"] for name in sys.argv[1:])
ended = False


def heard(number: int, _: object) -> None:
    global ended
    print(f"rank {os.environ['RANK']} got {signal.Signals(number).name}", flush=True)
    ended = number == last


for number in (*(handled if os.environ["RANK"] == "0" else ()), last):
    signal.signal(number, heard)
print(f"rank {os.environ['RANK']} waits", flush=True)
while not ended:
    time.sleep(0.05)
