"""The dashboard's files: what is served, and what a browser may do with it."""

from __future__ import annotations

import re
from pathlib import Path

from edl.web.pages import FOLDER, MEDIA_TYPES, read_files
from tests.support.web_fixture import Setup, play

MOST_VENDORED = 150_000
MOST_LINES = 400
VENDORED = FOLDER / "vendor"


def own(suffix: str) -> list[Path]:
    return [path for path in sorted(FOLDER.rglob(f"*{suffix}")) if VENDORED not in path.parents]


def test_every_launcher_serves_the_page_without_a_token() -> None:
    async def scenario(on: Setup) -> None:
        for rules in (True, False):
            on.web.use_master(on.master if rules else None)
            way = await on.ask("GET", "/", token=None)
            assert (way.code, way.headers["Location"]) == (302, "dashboard"), "relative, for proxies that add a prefix"
            page = await on.ask("GET", "/dashboard", token=None)
            assert page.code == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
            assert on.master.status().job not in page.text and on.web.url not in page.text, "it reveals nothing"

    play(scenario)


def test_the_headers_forbid_what_the_page_does_not_need() -> None:
    async def scenario(on: Setup) -> None:
        headers = (await on.ask("GET", "/dashboard", token=None)).headers
        rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; ") if " " in rule)
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == "'self'"
        assert rules["connect-src"] == "'self' http:"
        assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Frame-Options"] == "DENY"

    play(scenario)


def test_each_file_has_its_type_and_is_sent_again_only_if_it_has_changed() -> None:
    async def scenario(on: Setup) -> None:
        for name, file in read_files().items():
            reply = await on.ask("GET", f"/assets/{name}", token=None)
            assert (reply.code, reply.text) == (200, file.body.decode())
            assert reply.headers["Content-Type"] == f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8"
            assert reply.headers["Cache-Control"] == "no-cache"
            known = {"If-None-Match": reply.headers["ETag"]}
            assert (await on.ask("GET", f"/assets/{name}", token=None, headers=known)).code == 304

    play(scenario)


def test_no_file_outside_the_folder_is_served() -> None:
    async def scenario(on: Setup) -> None:
        for name in ("../server.py", "..%2Fserver.py", "%2e%2e/server.py", "/etc/passwd", "vendor", "vendor/"):
            reply = await on.ask("GET", f"/assets/{name}", token=None)
            assert reply.code in (401, 404) and "import" not in reply.text

    play(scenario)


def test_the_api_is_still_closed() -> None:
    async def scenario(on: Setup) -> None:
        for path in ("/v1/jobs", "JOB", "JOB/status", "/dashboard/x", "/assets", "/openapi.json"):
            assert (await on.ask("GET", path, token=None)).code == 401

    play(scenario)


def test_nothing_is_loaded_from_elsewhere_or_inline() -> None:
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", page)
    for path in own(".js"):
        text = path.read_text()
        assert all(source.startswith(".") for source in re.findall(r"from \"([^\"]+)\"", text)), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|dangerously|eval\(|document\.write", text), path


def test_every_file_that_is_named_is_there() -> None:
    files = set(read_files())
    for path in own(".js"):
        for source in re.findall(r"from \"([^\"]+)\"", path.read_text()):
            assert (path.parent / source).resolve().relative_to(FOLDER).as_posix() in files, f"{path}: {source}"
    named = re.findall(r"\"assets/([^\"]+)\"", (FOLDER / "index.html").read_text())
    assert set(named) <= files and len(named) > 5


def test_vendored_files_are_small_and_named_with_their_licences() -> None:
    names = {path.name for path in VENDORED.iterdir()}
    assert sum(path.stat().st_size for path in VENDORED.iterdir()) < MOST_VENDORED
    table = (VENDORED / "README.md").read_text()
    assert all(f"`{name}`" in table for name in names - {"README.md"})
    packages = re.findall(r"^\| \[([\w-]+)\]", table, re.MULTILINE)
    assert packages and {f"{name}.LICENSE.txt" for name in packages} <= names


def test_no_module_of_ours_is_too_long() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in own(".js") + own(".css")}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
