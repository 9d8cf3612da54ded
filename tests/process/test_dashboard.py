"""The dashboard in a real Chromium, before the HTTP server that ships and a Master whose status the test sets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from edl.web.front import Web, WebDeps
from edl.web.settings import HttpLimits, HttpSettings
from edl.wire.node_requests import OutputLine, OutputRequest
from edl.wire.scale_requests import Cordon, Drain, Resize
from tests.support import dashboard_jobs as jobs
from tests.support.browser import Tab, browsing, chromium
from tests.support.dashboard_jobs import DashboardMaster
from tests.support.fake_master import JOB
from tests.support.web_fixture import HOST, TOKEN, FakeOutput, Setup, node_facts, play

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium on this host (Debian: apt-get install chromium)"
)

LIMITS = HttpLimits(rate=1e6, burst=1e6, status_s=0.05)
READ_TOKEN = "a-token-that-can-only-read"
AXE = "axe-core@4.14.1"
BARRIERS = """axe.run().then(found => found.violations.map(
    one => [one.id, one.help, one.nodes.map(node => [node.html, node.any.map(any => any.message)])]))"""
FIRST_401 = "401 (Unauthorized)"
"""The page asks without a token first, because a certificate may do; the console mentions that."""

Scenario = Callable[[Tab, Setup], Awaitable[None]]


def browse(master: DashboardMaster, scenario: Scenario, settings: HttpSettings | None = None) -> None:
    """Open the dashboard of a job in a browser, and play a scenario. Nothing may be wrong on the page's console."""

    async def whole(on: Setup) -> None:
        on.web.use_master(master)
        async with browsing() as browser:
            tab = await browser.tab()
            await tab.size(1280, 900)
            await tab.open(f"{on.web.url}/")
            await scenario(tab, on)
            assert [one for one in tab.problems if FIRST_401 not in one] == []

    play(whole, settings, LIMITS, limit_s=600)


async def opened(tab: Tab, token: str = TOKEN) -> None:
    await tab.sign_in(token)
    await tab.until("document.querySelectorAll('.tile').length > 0 && document.querySelector('#events tbody tr')")


def rows(panel: str) -> str:
    return f"[...document.querySelectorAll('#{panel} tbody tr:not(.space)')]"


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.innerText"


def test_the_job_is_shown_and_followed() -> None:
    master = jobs.training()

    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        assert await tab.js("document.title") == f"{JOB} · running"
        tiles = await tab.js(text(".tiles"))
        for part in (
            "192",
            "on 24 nodes",
            "steps/s",
            "gpu-0005, ranks 40\N{EN DASH}47",
            "96.2 %",
            "3,000",
            "41 commits behind",
            "21",
        ):
            assert part in tiles, part
        assert await tab.js("document.querySelector('#nodes table').getAttribute('aria-rowcount')") == "27"
        first = await tab.js(f"{rows('changes')}[0].innerText")
        assert first.split("\t")[0] == "30" and "lost" in first and first.split("\t")[3:] == ["400 ms", "20 s", "40 ms"]
        assert "web-text" in await tab.js(text("#data"))
        master.show(phase="suspended", world_size=0)
        master.note("scale", "suspended by kim")
        await tab.until("document.title.endsWith('suspended')")
        await tab.until(f"{rows('events')}[0].innerText.includes('suspended by kim')")
        assert await tab.js("document.querySelector('.badge').textContent") == "suspended"

    browse(master, scenario)


@pytest.mark.slow
def test_a_thousand_nodes_and_a_name_that_is_markup() -> None:
    master = jobs.large()

    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        assert "Nodes (1,000)" in await tab.js(text("#nodes"))
        assert await tab.js(f"{rows('nodes')}.length") < 60, "only what is in view is in the document"
        assert await tab.js("document.querySelector('#nodes table').getAttribute('aria-rowcount')") == "1001"
        scroller = "document.querySelector('#nodes .scroller')"
        await tab.js(f"{scroller}.scrollTop = {scroller}.scrollHeight")
        await tab.until(f"{rows('nodes')}.at(-1).innerText.includes('gpu-0999')")
        await tab.js(f"{scroller}.scrollTop = 0")
        await tab.until(f"{rows('nodes')}.some(row => row.innerText.includes('<img src=x'))")
        await tab.js(
            "[...document.querySelectorAll('#nodes th button')].find(one => one.innerText.startsWith('Step')).click()"
        )
        await tab.until(f"{rows('nodes')}[0].innerText.includes('slow')")
        await tab.js("document.querySelector('#nodes input').focus()")
        await tab.write("onerror")
        await tab.until(f"{rows('nodes')}.length === 1")
        await tab.js("document.querySelector('#events button.text').click()")
        assert "<img src=x" in await tab.until(text("dialog"))
        assert await tab.js("document.images.length") == 1, "the icon"
        assert await tab.js("document.title") == f"{JOB} · running"

    browse(master, scenario)


@pytest.mark.slow
def test_errors_and_alarms() -> None:
    master = jobs.after_a_loss()

    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        errors = "[...document.querySelectorAll('#errors details')]"
        assert "root cause" in await tab.js(f"{errors}[0].innerText")
        assert "consequence" in await tab.js(f"{errors}[1].innerText")
        await tab.js(f"{errors}[0].open = true")
        assert "loss.backward()" in await tab.js(f"{errors}[0].querySelector('pre').innerText")
        assert jobs.HTML in await tab.js(f"{errors}[0].innerText")
        problems = await tab.js("[...document.querySelectorAll('.problems strong')].map(one => one.innerText)")
        assert problems[0] == "disk-full · /checkpoints" and "dropped slot" in problems and problems[-1] == "pending"
        assert await tab.js("document.querySelector('.problems').getAttribute('aria-live')") == "polite"
        master.scale = dataclasses.replace(master.scale, waiting=f"{master.shown.reason}; a node is being fetched")
        master.show()
        await tab.until("document.querySelector('.problems').innerText.includes('a node is being fetched')")
        assert master.shown.reason not in await tab.js(text(".problems")), "it stands above"
        master.scale = dataclasses.replace(master.scale, waiting=master.shown.reason)
        master.show()
        await tab.until("!document.querySelector('.problems').innerText.includes('pending')")

    browse(master, scenario)


@pytest.mark.slow
def test_parameter_servers() -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        assert await tab.js(f"{rows('ps')}.length") == 4
        assert "2.4 s" in await tab.js(f"{rows('ps')}[2].innerText") and "1.2 GiB" in await tab.js(text("#ps"))
        assert "all copies in sync" in await tab.js(text("#ps"))

    browse(jobs.parameter_servers(), scenario)


async def press(tab: Tab, label: str, within: str = "document") -> None:
    """Click on a button."""
    find = f"[...{within}.querySelectorAll('button')].find(one => one.innerText.trim() === {json.dumps(label)})"
    await tab.until(f"{find} && !{find}.disabled")
    await tab.js(f"{find}.click()")


@pytest.mark.slow
def test_actions_say_what_they_do_and_need_a_confirmation() -> None:
    master = jobs.training()
    dialog = "document.querySelector('dialog[open]')"

    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        await press(tab, "Scale…")
        assert "24 nodes; 16 to 32 are allowed" in await tab.until(f"{dialog}?.innerText")
        await tab.key("Escape", 27)
        await tab.until("!document.querySelector('dialog')")
        assert master.requests == [], "closed without a confirmation"
        await press(tab, "Scale…")
        await tab.until(dialog)
        await tab.js(f"{dialog}.querySelector('input').select()")
        await tab.write("20")
        await press(tab, "Scale", dialog)
        await tab.until("!document.querySelector('dialog')")
        (resize,) = master.requests
        assert isinstance(resize, Resize) and (resize.nodes, resize.by) == (20, f"dashboard (HTTP, {HOST})")
        for name in ("cordon", "drain"):
            await choose(tab, "gpu-0003", name)
            assert "gpu-0003" in await tab.until(f"{dialog}?.innerText")
            await press(tab, name.capitalize(), dialog)
            await tab.until("!document.querySelector('dialog')")
        cordon, drain = master.requests[1:]
        assert isinstance(cordon, Cordon) and cordon.node == "gpu-0003" and cordon.cordoned
        assert isinstance(drain, Drain) and drain.nodes == ("gpu-0003",)
        await press(tab, "Stop…")
        assert "cannot be undone" in await tab.until(f"{dialog}?.innerText")
        assert await tab.js("document.activeElement.innerText") == "Cancel", "Enter alone does not stop a job"
        await press(tab, "Stop", dialog)
        await tab.until("!document.querySelector('dialog')")
        assert [asked.by for asked in master.asked] == [f"dashboard (HTTP, {HOST})"]
        assert "checkpoint" in await tab.until(text(".outcome p"))

    browse(master, scenario)


@pytest.mark.slow
def test_a_token_that_can_only_read(tmp_path: Path) -> None:
    master = jobs.training()
    for name, token in (("full", TOKEN), ("read", READ_TOKEN)):
        (tmp_path / name).write_text(f"{token}\n")
    settings = HttpSettings(0, token_file=str(tmp_path / "full"), read_token_file=str(tmp_path / "read"))

    async def scenario(tab: Tab, on: Setup) -> None:
        await tab.sign_in("not-a-token")
        assert "unknown token" in await tab.until("document.querySelector('.problem')?.innerText")
        await opened(tab, READ_TOKEN)
        await press(tab, "Checkpoint…")
        assert "needs a token with full access" in await tab.until("document.querySelector('dialog')?.innerText")
        await tab.sign_in(READ_TOKEN)
        assert "read-only" in await tab.until("document.querySelector('dialog .problem').innerText")
        assert master.asked == []
        await tab.sign_in(TOKEN)
        await tab.until("document.querySelector('dialog')?.innerText.includes('next step boundary')")
        await press(tab, "Checkpoint", "document.querySelector('dialog')")
        await tab.until("!document.querySelector('dialog')")
        assert len(master.asked) == 1
        for place in ("location.href", "JSON.stringify(localStorage)", "document.cookie", "document.body.innerHTML"):
            assert TOKEN not in await tab.js(place) and READ_TOKEN not in await tab.js(place)
        assert await tab.js("sessionStorage.getItem('edl-token')") == TOKEN
        await tab.reload()
        await tab.until("document.querySelectorAll('.tile').length > 0"), "it stays until the tab is closed"
        await tab.js("[...document.querySelectorAll('button')].find(one => one.innerText.includes('sign out')).click()")
        await tab.until("document.querySelector('#token')")
        assert await tab.js("sessionStorage.getItem('edl-token')") is None

    browse(master, scenario, settings)


async def choose(tab: Tab, node: str, name: str) -> None:
    """Choose from the menu of a node."""
    menu = f"document.querySelector('#nodes select[aria-label=\"Actions for node {node}\"]')"
    await tab.js(f"{menu}.value = '{name}'; {menu}.dispatchEvent(new Event('change', {{bubbles: true}}))")


@pytest.mark.slow
def test_output_and_stacks_of_a_node() -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        await choose(tab, "gpu-0003", "output")
        lines = await tab.until(text("dialog pre"))
        assert lines == "[0] step 1\n[0] warning <b>bold</b>", "without colours, and nothing of it is markup"
        on.output.lines.append(OutputLine(1, 1, False, "a later line"))
        await tab.until("document.querySelector('dialog pre').innerText.endsWith('[1] a later line')")
        assert on.output.asked[0] == OutputRequest(lines=200) and on.output.asked[-1].after > 0
        await press(tab, "Close")
        await choose(tab, "gpu-0003", "stacks")
        assert "line 7, in train" in await tab.until(text("dialog pre"))
        await press(tab, "Close")
        await choose(tab, "gpu-0004", "output")
        await tab.until("document.querySelector('dialog .problem')?.innerText.includes('no launcher of node gpu-0004')")
        tab.problems = [one for one in tab.problems if "404 (Not Found)" not in one]

    browse(jobs.training(), scenario)


@contextlib.asynccontextmanager
async def another(master: DashboardMaster | None, url: Callable[[], str | None]) -> AsyncIterator[Web]:
    """Another launcher of the job."""
    web = Web(WebDeps(JOB, HttpSettings(0), lambda: TOKEN, lambda text: None, lambda: 100.0, LIMITS))
    web.listen(HOST)
    web.begin(url, node_facts, FakeOutput())
    web.use_master(master)
    try:
        yield web
    finally:
        await web.leave()


@pytest.mark.slow
def test_the_page_finds_the_next_master() -> None:
    first, second = jobs.training(), jobs.training()
    urls: dict[str, str | None] = {"master": None}

    async def scenario(tab: Tab, on: Setup) -> None:
        async with another(None, lambda: urls["master"]) as other:
            await opened(tab)
            # The Master moves to another launcher; this one is still there and passes requests on.
            second.show(round=31)
            on.web.use_master(None)
            first.close()
            other.use_master(second)
            on.url = urls["master"] = other.url
            await tab.until("document.querySelector('.who').innerText.includes('round 31')")
            second.note("node-joined", "seen through the relay")
            await tab.until(f"{rows('events')}[0].innerText.includes('seen through the relay')")
            assert await tab.js("document.querySelector('.problems').innerText") == ""
            # This launcher ends. The page goes on with the other one, where it never was.
            await on.web.leave()
            second.show(round=32)
            await tab.until("document.querySelector('.who').innerText.includes('round 32')")
            assert other.url.removeprefix("http://") in await tab.until(text(".problems"))
            second.note("node-joined", "seen from elsewhere")
            await tab.until(f"{rows('events')}[0].innerText.includes('seen from elsewhere')")
            await press(tab, "Checkpoint…")
            await press(tab, "Checkpoint", "document.querySelector('dialog')")
            await tab.until("!document.querySelector('dialog')")
            assert len(second.asked) == 1
            numbers = await tab.js(f"{rows('events')}.length")
            assert numbers > 10
        await tab.until("document.querySelector('.who').innerText.includes('reconnecting')")
        assert "last known status" in await tab.until(text(".problems"))
        tab.problems = [one for one in tab.problems if "ERR_CONNECTION_REFUSED" not in one and "ERR_" not in one]

    browse(first, scenario)


@pytest.mark.slow
def test_a_hundred_thousand_events_come_by_pages() -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        await tab.until(f"{text('#events .foot')}.startsWith('500 of 500')")
        assert await tab.js(f"{rows('events')}[0].innerText.includes('gpu-100000 ')")
        scroller = "document.querySelector('#events .scroller')"
        for pages in range(2, 11):
            await tab.js(f"{scroller}.scrollTop = {scroller}.scrollHeight")
            await tab.until(f"{text('#events .foot')}.startsWith('{500 * pages:,} of')")
        assert "older" not in await tab.js(text("#events .foot")), "5,000 are as many as the page holds"
        await tab.js(f"{scroller}.scrollTop = {scroller}.scrollHeight")
        await tab.until(f"{rows('events')}.at(-1).innerText.includes('gpu-95001 ')")
        assert await tab.js("document.querySelectorAll('*').length") < 3000

    browse(jobs.long_history(100_000), scenario)


@pytest.mark.slow
def test_with_the_keyboard_alone() -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await opened(tab)
        await tab.reload()
        await tab.until("document.querySelector('#events tbody tr')")
        await tab.key("Tab", 9)
        assert await tab.js("document.activeElement.className") == "skip"
        await tab.key("Tab", 9)
        assert await tab.js("document.activeElement.innerText") == "Checkpoint…"
        assert await tab.js("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is visible"
        await tab.key("Enter", 13, "\r")
        await tab.until("document.querySelector('dialog[open]')?.contains(document.activeElement)")
        await tab.key("Escape", 27)
        await tab.until("!document.querySelector('dialog')")
        assert await tab.js("document.activeElement.innerText") == "Checkpoint…", "the focus comes back"
        await tab.js("document.querySelector('#events button.text').focus()")
        await tab.key("Enter", 13, "\r")
        await tab.until("document.querySelector('dialog[open] .entries')")
        await tab.key("Escape", 27)
        await tab.until("!document.querySelector('dialog')")

    browse(jobs.training(), scenario)


@pytest.mark.soak_but("after_a_loss")
@pytest.mark.slow
@pytest.mark.parametrize("job", [jobs.large, jobs.after_a_loss, jobs.parameter_servers])
def test_nothing_is_wider_than_a_phone(job: Callable[[], DashboardMaster]) -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await tab.size(360, 780)
        await opened(tab)
        assert await tab.js("document.documentElement.scrollWidth") == 360
        wide = "document.querySelector('#nodes .scroller')"
        assert await tab.js(f"{wide}.scrollWidth <= {wide}.clientWidth"), "the table of nodes fits as well"

    browse(job(), scenario)


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, from the npm registry."""
    if shutil.which("npm") is None:
        pytest.skip("axe-core is fetched with npm, which is not installed")
    folder = tmp_path_factory.mktemp("axe")
    try:
        packed = subprocess.run(
            ["npm", "pack", "--silent", AXE], cwd=folder, check=True, capture_output=True, text=True, timeout=120
        )
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"axe-core cannot be fetched: {error}")
    with tarfile.open(folder / packed.stdout.strip()) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


@pytest.mark.soak_but("after_a_loss")
@pytest.mark.slow
@pytest.mark.parametrize("job", [jobs.large, jobs.after_a_loss, jobs.parameter_servers])
def test_axe_finds_no_barriers(axe: str, job: Callable[[], DashboardMaster]) -> None:
    async def check(tab: Tab, what: str) -> None:
        found = await tab.js(BARRIERS)
        assert found == [], f"{what}: {json.dumps(found, indent=1)[:6000]}"

    async def scenario(tab: Tab, on: Setup) -> None:
        await tab.until("document.querySelector('#token')")
        await tab.js(axe)
        await check(tab, "the form for the token")
        await opened(tab)
        await tab.js("document.querySelectorAll('details').forEach(one => one.open = true)")
        for width in (1280, 360):
            for dark in (False, True):
                await tab.size(width, 900)
                await tab.dark(dark)
                await check(tab, f"{width} wide, {'dark' if dark else 'light'}")
        await tab.size(1280, 900)
        await press(tab, "Stop…")
        await tab.until("document.querySelector('dialog[open]')")
        await check(tab, "a dialog")

    browse(job(), scenario)


@pytest.mark.slow
def test_light_and_dark_can_be_chosen() -> None:
    async def scenario(tab: Tab, on: Setup) -> None:
        await tab.dark(False)
        await opened(tab)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await tab.js(ground)
        choose = "document.querySelector('.theme select')"
        await tab.js(f"{choose}.value = 'dark'; {choose}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        dark = await tab.js(ground)
        assert light != dark
        await tab.reload()
        await tab.until("document.querySelectorAll('.tile').length > 0")
        assert await tab.js(ground) == dark, "it is remembered"
        await tab.js(f"{choose}.value = 'auto'; {choose}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        assert await tab.js(ground) == light
        await tab.dark(True)
        assert await tab.js(ground) == dark

    browse(jobs.training(), scenario)
