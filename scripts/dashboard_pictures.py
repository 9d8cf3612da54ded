"""The pictures of docs/dashboard.md, of a made-up job in a real Chromium.

python -m scripts.dashboard_pictures
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

from edl.adapters.clock import wall_clock_s
from edl.web.settings import HttpLimits
from tests.support import dashboard_jobs as jobs
from tests.support.browser import Tab, browsing
from tests.support.dashboard_jobs import DashboardMaster
from tests.support.web_fixture import TOKEN, Setup, play

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECONDS = 25
"""How long the job is watched, so that there is something to show over time."""
PICTURES = (("dashboard", 1280, 1010, False), ("dashboard-phone", 360, 800, True))
"""Name, width, height, and whether it is dark."""


async def main(on: Setup) -> None:
    """Open the page, watch the job for a while, write the pictures."""
    jobs.NOW_S = wall_clock_s()
    master = jobs.training()
    on.web.use_master(master)
    async with browsing() as browser:
        tab = await browser.tab()
        await tab.size(1280, 900)
        await tab.open(f"{on.web.url}/")
        await tab.sign_in(TOKEN)
        await tab.until("document.querySelector('#events tbody tr')")
        for second in range(SECONDS):
            train(master, second)
            await asyncio.sleep(1.0)
        for name, width, height, dark in PICTURES:
            await picture(tab, DOCS / f"{name}.webp", width, height, dark=dark)


def train(master: DashboardMaster, second: int) -> None:
    """Let a second pass in the job."""
    slower = 1 + 0.02 * math.sin(second) + (0.3 if 9 <= second <= 11 else 0.0)
    nodes = tuple(dataclasses.replace(node, step_s=node.step_s * slower) for node in jobs.nodes(24, 8, 2))
    master.show(nodes=nodes, commit=master.shown.commit + 11)


async def picture(tab: Tab, path: Path, width: int, height: int, *, dark: bool) -> None:
    """Write a picture of the upper part of the page."""
    await tab.size(width, height)
    await tab.dark(dark)
    await tab.js("scrollTo(0, 0)")
    await asyncio.sleep(1.0)  # a new size is drawn in the next frames
    await tab.picture(path, format="webp", quality=72)
    print(path.name)


if __name__ == "__main__":
    play(main, limits=HttpLimits(rate=1e6, burst=1e6))
