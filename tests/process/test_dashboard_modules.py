"""The pure modules of the dashboard, in a real Chromium, against plain references in Python."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edl.cli import node_text
from edl.cli.output_text import printable
from edl.master.goodput.report import cost_text
from edl.master.goodput.slot_times import NS, Cost
from edl.master.goodput.slot_use import SlotUse
from edl.web.settings import HttpLimits
from edl.web.status_feed import change_of
from edl.wire import json_messages
from edl.wire.health import HealthView
from edl.wire.records import Settings
from tests.support import dashboard_jobs as jobs
from tests.support.browser import Tab, browsing, chromium
from tests.support.web_fixture import Setup, play
from tests.unit.edl.web.test_status_feed import sorted_nodes, varied

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium on this host (Debian: apt-get install chromium)"
)


DASH = "\N{EN DASH}"


def modules(scenario: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
    """Play a scenario with a function that evaluates ``body``, with ``m`` the module and ``given`` the argument."""

    async def whole(on: Setup) -> None:
        async with browsing() as browser:
            tab: Tab = await browser.tab()
            await tab.open(f"{on.web.url}/dashboard")
            await tab.until("document.querySelector('#token')")

            async def run(module: str, body: str, given: Any = None) -> Any:
                text = json.dumps(given)
                return await tab.js(
                    f"import('{on.web.url}/assets/{module}').then(m => {{ const given = {text}; return {body}; }})"
                )

            await scenario(run)

    play(whole, limits=HttpLimits(rate=1e6, burst=1e6), limit_s=300)


def plain(value: object) -> Any:
    return json.loads(json_messages.encode(value))


@pytest.mark.slow
def test_the_status_after_a_change() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        pairs = []
        for seed in range(60):
            draw = random.Random(seed)
            old = jobs.training(many=draw.randrange(1, 12), outside=2).status()
            new = varied(varied(old, draw), draw)
            pairs.append((plain(old), plain(change_of(old, new)), sorted_nodes(plain(new))))
        found = await run(
            "status.js", "given.map(([old, change]) => m.changed(old, change))", [pair[:2] for pair in pairs]
        )
        for got, (_, _, wanted) in zip(found, pairs, strict=True):
            assert sorted_nodes(got) == wanted
            places = [node["position"] % 10**6 for node in got["nodes"]]
            assert places == sorted(places), "in the order of the ranks"

    modules(scenario)


@pytest.mark.slow
def test_the_pace_is_that_of_edl_top() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        statuses = []
        for seed in range(60):
            draw = random.Random(seed)
            statuses.append(varied(jobs.training(many=draw.randrange(1, 12)).status(), draw))
        found = await run("status.js", "given.map(m.pace)", [plain(status) for status in statuses])
        for got, status in zip(found, statuses, strict=True):
            wanted = node_text.pace_of(status)
            assert got["rate"] == pytest.approx(wanted.steps_per_s) and got["nodes"] == wanted.nodes
            assert (got["slowest"] or {"node": ""})["node"] == wanted.slowest
        nodes = statuses[0].nodes
        ranks = await run("status.js", "given.map(m.ranks)", [plain(node) for node in nodes])
        assert [one.replace(DASH, "-") for one in ranks] == [node_text.ranks_of(node) for node in nodes]
        steps = [0.0, 0.000081, 0.0812, 0.09996, 0.5, 0.9994, 0.9996, 1.25, 12.0, 99.94, 99.96, 1234.5]
        texts = await run("format.js", "given.map(m.step)", steps)
        assert [text.replace(DASH, "-").replace(",", "") for text in texts[:1] + texts[2:3] + texts[7:8]] == [
            node_text.step_text(one) for one in (0.0, 0.0812, 1.25)
        ]
        assert texts[-2:] == ["100 s", "1,235 s"]

    modules(scenario)


@pytest.mark.slow
def test_prescribed_settings() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        given = [
            plain(Settings(3, global_batch=4096, factor=2.0)),
            plain(Settings(4, factor=0.5)),
            plain(Settings(5, factor=0.0)),
        ]
        assert await run("status.js", "given.map(m.settingsText)", given) == [
            "number 3: batch 4,096, learning rate \u00d7 2",
            "number 4: learning rate \u00d7 0.5",
            "number 5",
        ]

    modules(scenario)


@pytest.mark.slow
def test_a_check_of_the_nodes_is_no_problem() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        health = (
            HealthView("a", "h", "checking", "", excluded=True),
            HealthView("b", "h", "due", "", excluded=True),
            HealthView("c", "h", "faulty", "no memory", excluded=False),
        )
        status = plain(dataclasses.replace(jobs.training(many=3).status(), health=health))
        texts = await run("views/problems.js", "m.problemsOf(given).map(one => one.text)", status)
        assert [text for text in texts if text.startswith(("checking", "due", "faulty"))] == [
            "due",
            "faulty: no memory",
        ]

    modules(scenario)


@pytest.mark.slow
def test_the_cost_of_a_change_is_read_from_the_masters_own_words() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        lines, wanted = [], []
        for seed in range(100):
            draw = random.Random(seed)
            amounts = {
                use: draw.randrange(0, 5000) * NS // draw.choice([1, 7, 1000]) for use in SlotUse if draw.random() < 0.4
            }
            cost = Cost(took_s=draw.choice([0.143, 12.4, 5310.0]), amounts=amounts, slots=draw.randrange(1, 9))
            lines.append(f"round 2 is underway: in process; {cost_text(cost)}")
            wanted.append((cost.took_s, sum(amounts.values()) / NS, amounts.get(SlotUse.REDONE, 0) / NS / cost.slots))
        found = await run("changes.js", "given.map(m.costOf)", [*lines, "round 1 is underway: in process"])
        assert found.pop() is None
        for got, want in zip(found, wanted, strict=True):
            assert (got["tookS"], got["slotS"], got["redoneS"]) == pytest.approx(want, rel=0.05, abs=0.0006)
        assert await run(
            "changes.js", "given.map(m.workersOf)", ["round 2: 3 nodes, 1,024 workers (…)", "1 worker", "no"]
        ) == [1024, 1, None]

    modules(scenario)


@pytest.mark.slow
def test_a_job_that_waits_or_sleeps_has_no_workers() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        entries = [
            {"at_s": at_s, "kind": kind, "text": text}
            for at_s, kind, text in [
                (1, "world-formed", "round 1: 3 nodes, 3 workers (…)"),
                (100, "node-lost", "node c lost"),
                (101, "waiting", "2 nodes ready"),
                (300, "world-formed", "round 2: 2 nodes, 2 workers (…)"),
                (400, "scale", "job suspended by kim"),
                (401, "scale", "the job is suspended, as requested by kim"),
                (600, "world-formed", "round 3: 2 nodes, 2 workers (…)"),
            ]
        ]
        assert await run("changes.js", "m.sizes(given)", entries) == [[1, 101, 300, 401, 600], [3, 0, 2, 0, 2]]

    modules(scenario)


@pytest.mark.slow
def test_events_are_read_however_they_are_cut() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        text = (
            ':\n\nevent: status\ndata: {"a": 1}\n\nid: 7\nevent: change\r\ndata: b\r\ndata: c\r\n\r\n:\n\ndata: d\n\n'
        )
        cuts = [sorted(random.Random(seed).sample(range(len(text)), 5)) for seed in range(50)]
        parts = [[text[begin:end] for begin, end in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
        body = """given.map(parts => { let rest = '', all = []; for (const part of parts) {
            const [events, left] = m.parse(rest + part); all.push(...events); rest = left; } return all; })"""
        wanted = [("status", "", '{"a": 1}'), ("change", "7", "b\nc"), ("message", "", "d")]
        for got in await run("sse.js", body, parts):
            assert [(one["event"], one["id"], one["data"]) for one in got] == wanted

    modules(scenario)


@pytest.mark.slow
def test_entries_are_merged_and_bounded() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        cases = []
        for seed in range(100):
            draw = random.Random(seed)
            numbers = sorted(draw.sample(range(60), draw.randrange(30)))
            more = sorted(draw.sample(range(draw.choice([0, 50]), 90), draw.randrange(20)))
            cases.append((numbers, more, draw.choice([5, 40, 1000])))
        entries = [
            ([{"number": one} for one in old], [{"number": one} for one in new], most) for old, new, most in cases
        ]
        found = await run("history.js", "given.map(one => m.merged(...one).map(entry => entry.number))", entries)
        assert found == [sorted({*old, *new})[-most:] for old, new, most in cases]

    modules(scenario)


@pytest.mark.slow
def test_the_history_of_the_last_run_goes_when_the_job_is_started_again() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        def entries(first: int, last: int, began_s: float) -> list[dict[str, Any]]:
            return [{"number": number, "at_s": began_s + number, "kind": "drain"} for number in range(first, last + 1)]

        body = """(async () => { const history = new m.History(), asked = [];
            const ask = async (path) => (asked.push(path), { text: async () => given.page });
            history.entries = given.old;
            await history.follow(given.tail, "job", ask);
            return [history.entries.map(one => [one.number, one.at_s]), asked.length]; })()"""
        old, again = entries(1, 40, 1000.0), entries(1, 50, 5000.0)
        for tail in (again[:10], again[30:40], again[40:50]):
            page = "\n".join(map(json.dumps, again[: tail[-1]["number"]]))
            found, asked = await run("history.js", body, {"old": old, "tail": tail, "page": page})
            if tail[0]["number"] <= old[-1]["number"]:  # otherwise nothing shows it
                assert [number for number, _ in found] == list(range(1, tail[-1]["number"] + 1))
                assert all(at_s > 5000 for _, at_s in found) and asked <= 1
        found, asked = await run("history.js", body, {"old": old, "tail": old[30:], "page": ""})
        assert (len(found), asked) == (40, 0)

    modules(scenario)


@pytest.mark.slow
def test_a_day_of_samples_stays_small() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        body = """(() => { const kept = new m.Samples(3600); for (let at = 0; at < 86400; at += 1) kept.add(at, at);
            const equal = kept.times.every((one, at) => one === kept.values[at]);
            return [kept.times.length, kept.times[0], kept.times.at(-1), equal]; })()"""
        length, first, last, equal = await run("samples.js", body)
        assert 1800 <= length <= 3601 and first == 0 and last > 86300 and equal

    modules(scenario)


@pytest.mark.slow
def test_pauses_grow_up_to_a_limit() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        shortest = await run("live.js", "given.map(one => m.pauseMs(one, 0))", list(range(12)))
        longest = await run("live.js", "given.map(one => m.pauseMs(one, 1))", list(range(12)))
        assert shortest[0] == 250 and longest[0] == 500 and longest[-1] == 15_000
        assert longest == sorted(longest) and all(
            2 * short == long for short, long in zip(shortest, longest, strict=True)
        )

    modules(scenario)


@pytest.mark.slow
def test_the_launchers_that_are_asked() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        body = """(() => { const all = new m.Launchers('http://a:8080/'); all.learnMaster('http://b:8080');
            all.learnNodes(given.map(host => ({host}))); return [0, 1, 2, 3].map(() => all.candidates()); })()"""
        hosts = [f"h{at}" for at in range(10)] + ["fd00::1"]
        rounds = await run("launchers.js", body, hosts)
        assert all(one[:2] == ["http://a:8080/", "http://b:8080/"] and len(one) <= 6 for one in rounds)
        asked = {url for one in rounds for url in one}
        assert {f"http://{host}:8080/" for host in hosts[:10]} <= asked and "http://[fd00::1]:8080/" in asked
        assert all(re.fullmatch(r"http://[^/]+/", url) for url in asked)

    modules(scenario)


@pytest.mark.slow
def test_windows_of_rows() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        draw = random.Random(7)
        cases = [(draw.random() * 40_000, 440, 30, draw.choice([0, 1, 20, 1000])) for _ in range(200)]
        cases = [(min(top, max(0, rows * 30 - 440)), height, row, rows) for top, height, row, rows in cases]
        found = await run("views/virtual_table.js", "given.map(one => m.windowOf(...one))", cases)
        for got, (top, height, row, rows) in zip(found, cases, strict=True):
            seen = [at for at in range(rows) if at * row < top + height and (at + 1) * row > top]
            assert set(seen) <= set(range(got["first"], got["end"])) <= set(range(rows))
            assert got["end"] - got["first"] <= height // row + 15

    modules(scenario)


@pytest.mark.slow
def test_lines_of_workers_look_as_in_edl_logs() -> None:
    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        lines = [
            "plain",
            "\x1b[1;31mred\x1b[0m",
            "10 %\r50 %\r100 %\r",
            "\x1b]0;title\x07text",
            "bell\x07",
            "cut \x1b[",
            "",
        ]
        lines += ["\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "<b>markup</b>", "\x9b31m", "trailing   "]
        wanted = [printable(line) for line in lines]
        assert await run("lines.js", "given.map(m.printable)", lines) == wanted
        body = "[true, false].map(gap => m.appended(given, [{rank: -1, text: 'x'}, {rank: 3, text: 'y'}], gap, 3))"
        gap, shown = await run("lines.js", body, ["a", "b"])
        assert shown == ["b", "[-] x", "[3] y"]
        assert gap == ["(some lines are missing: more were written than are kept)", "[-] x", "[3] y"]

    modules(scenario)


@pytest.mark.slow
def test_the_rank_that_the_others_wait_for() -> None:
    def worker(peers: float, commit: float = 0.0) -> dict[str, float]:
        return {"slot": 0, "step_s": 0.1, "peers_share": peers, "commit_share": commit}

    def job(*nodes: list[dict[str, float]]) -> dict[str, Any]:
        return {"nodes": [{"node": f"n{at}", "first_rank": 2 * at, "ranks": ranks} for at, ranks in enumerate(nodes)]}

    async def scenario(run: Callable[..., Awaitable[Any]]) -> None:
        even = job([worker(0.5), worker(0.48)], [worker(0.5), worker(0.5)])
        one = job([worker(0.5), worker(0.5)], [worker(0.5), worker(0.1, 0.1)])
        unknown = job([worker(-1.0), worker(-1.0)], [worker(-1.0), worker(-1.0)])
        older = plain(jobs.training(many=3).status())
        found = await run("status.js", "given.map(m.slowestRank)", [even, one, unknown, older])
        assert found[0] is None and found[2:] == [None, None]
        assert (found[1]["rank"], found[1]["node"]["node"]) == (3, "n1")
        assert (found[1]["ownS"], found[1]["medianS"]) == pytest.approx((0.08, 0.05))

    modules(scenario)
