"""The dashboard of a real job in a real browser: the launcher that served the page, and is the Master, is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.process.free_ports import free_endpoints
from tests.process.harness import Job, OutsideEtcd
from tests.support.browser import browsing, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this host (Debian: apt-get install chromium)"),
]

HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}
"""Three addresses of this host, so that all launchers can have the same port for HTTP, as on three hosts."""


@pytest.fixture
def job(tmp_path: Path, etcd: OutsideEtcd) -> Iterator[Job]:
    port = free_endpoints(1)[0].rpartition(":")[2]
    options = [f"--http-port={port}", "--lease-ttl=2", "--standby=none"]
    with Job(tmp_path, [etcd.endpoint], nnodes="1:3", options=options, arguments=["--free"]) as running:
        for name, host in HOSTS.items():
            running.start(name, options=[f"--local-addr={host}"])
        yield running


@pytest.mark.slow
def test_the_page_lives_on_when_the_launcher_that_served_it_is_killed(job: Job) -> None:
    async def scenario() -> None:
        await asyncio.to_thread(job.wait_world, 3)
        status = await asyncio.to_thread(job.status)
        token = (await asyncio.to_thread(job.cli, "token")).stdout.strip()
        master, url = status["master"], status["http"]
        assert urlsplit(url).hostname == HOSTS[master]
        others = sorted(set(HOSTS) - {master})
        async with browsing() as browser:
            tab = await browser.tab()
            await tab.size(1280, 900)
            await tab.open(url)
            await tab.sign_in(token)
            await tab.until("document.querySelector('#nodes')?.innerText.includes('Nodes (3)')")
            before = int(await tab.js("document.querySelector('.who').innerText.match(/round (\\d+)/)[1]"))

            await asyncio.to_thread(job.kill, master)
            await tab.until("document.querySelector('.problems').innerText.includes('no longer answers')")
            await tab.until(
                f"[...document.querySelectorAll('#events tr')].some(row => /node {master} lost/.test(row.innerText))"
            )
            await tab.until(f"document.querySelector('.who').innerText.match(/round (\\d+)/)[1] > {before}")
            assert await tab.js("document.querySelector('.who').innerText.includes('live')")
            assert f"node {master} lost" in await tab.js(
                "document.querySelector('#changes tbody tr:not(.space)').innerText"
            )

            menu = f"document.querySelector('#nodes select[aria-label=\"Actions for node {others[0]}\"]')"
            await tab.js(f"{menu}.value = 'stacks'; {menu}.dispatchEvent(new Event('change', {{bubbles: true}}))")
            await tab.until("document.querySelector('dialog pre')?.innerText.includes('plain.py')")
            await tab.js("document.querySelector('dialog').close()")

            stop = "[...document.querySelectorAll('{}')].find(one => one.innerText.startsWith('Stop'))"
            await tab.js(f"{stop.format('.tools button')}.click()")
            await tab.until(stop.format("dialog button"))
            await tab.js(f"{stop.format('dialog button')}.click()")
            codes = [await asyncio.to_thread(job.nodes[name].exit_code) for name in others]
            assert codes == [9, 9], "stopped from the page"
            await tab.until("document.querySelector('.problems').innerText.includes('The job has ended')")

    asyncio.run(asyncio.wait_for(scenario(), 600))
