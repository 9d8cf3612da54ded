"""``python -m edl.testing``: run schedules of the simulator, or replay one."""

from __future__ import annotations

import sys
import time

from edl.testing.sim.schedules import Schedule, play, shrink

if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    if count == 1:
        r = play(Schedule.draw(first), print)
        print(r.violation); print(Schedule.draw(first)); sys.exit()
    t=time.time(); bad=0; n=0;ev=0;st=0
    for seed in range(first, first+count):
        try:
            r = play(Schedule.draw(seed))
        except Exception as e:
            print("EXC", seed, repr(e)); bad+=1; continue
        n+=1; ev+=r.events; st+=r.steps
        if r.violation:
            bad+=1
            print(seed, r.violation.splitlines()[0][:200])
    print(n, "bad", bad, "events", ev/n, "steps", st/n, (time.time()-t)/n*1000, "ms each")
