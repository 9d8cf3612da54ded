"""The table of options: one entry for each, and what comes from it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import click
import click.testing
import pytest

from edl.config import JobSpec, NodeRange, SlotRules, Timeouts
from edl.errors import SettingError
from edl.job_records import Training
from edl.launch.dropin_table import Row
from edl.launch.options import BY_NAME, BY_SPELLING, OPTIONS, SECTIONS, entry_of, launcher_options, of_record, record
from edl.launch.options.__main__ import TABLES, markdown
from edl.launch.options.agreement import agreed
from edl.launch.options.option import Option, plain_text
from edl.launch.options.parsing import at_least
from edl.launch.paddle_table import PADDLE_ROWS
from edl.launch.settings import StateSettings
from edl.launch.torchrun_table import TORCHRUN_ROWS
from edl.types import JobId

PAGE = Path(__file__).resolve().parents[5] / "docs" / "launcher.md"


def by_click() -> dict[str, click.Option]:
    @click.command()
    @launcher_options
    def probe(**_: object) -> None: ...

    return {str(one.name): one for one in probe.params if isinstance(one, click.Option)}


def test_the_page_is_current() -> None:
    told = "docs/launcher.md is out of date: run python -m edl.launch.options --write docs/launcher.md"
    assert TABLES.replaced(PAGE.read_text()) == PAGE.read_text(), told


def test_the_tables_are_written_into_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("Number of nodes in a world", "Something else"))
    TABLES.main(["--write", str(page)])
    assert page.read_text() == PAGE.read_text()
    TABLES.main(["--markdown"])
    assert capsys.readouterr().out.strip() == markdown().strip()
    with pytest.raises(ValueError, match="the page lacks the line"):
        TABLES.replaced("no marks")
    with pytest.raises(SystemExit, match="usage"):
        TABLES.main([])


def test_no_spelling_and_no_name_stands_for_two_options() -> None:
    spellings = Counter(spelling for option in OPTIONS for spelling in option.names)
    assert [spelling for spelling, count in spellings.items() if count > 1] == []
    assert len(BY_NAME) == len(OPTIONS)
    assert set(BY_SPELLING) == set(spellings)


def test_click_reads_what_the_table_says() -> None:
    read = by_click()
    for option in OPTIONS:
        assert option.name in read, option.flag
        assert set(read[option.name].opts) == set(option.names)


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.setting is not None], ids=lambda one: one.flag)
def test_an_option_fills_a_field_that_exists_and_its_default_is_that_fields(option: Option) -> None:
    assert option.setting is not None
    fields = {field.name for field in dataclasses.fields(option.setting.record)}
    assert option.setting.name in fields
    assert option.value(option.default) == option.setting.default


def test_no_field_is_filled_by_two_options() -> None:
    filled = Counter((one.setting.record, one.setting.name) for one in OPTIONS if one.setting is not None)
    assert [field for field, count in filled.items() if count > 1] == []


def test_a_record_comes_from_its_options() -> None:
    values = {option.name: option.default for option in of_record(StateSettings)}
    assert record(StateSettings, values) == StateSettings()
    made = record(StateSettings, {**values, "state_memory": "2G", "copies": "never"})
    assert (made.memory_bytes, made.copying.value) == (2 << 30, "never")


def test_an_error_names_value_place_and_next_action() -> None:
    option = Option("--some-count", help="", written_default=1, check=at_least(1), advice="Leave it out")
    with pytest.raises(SettingError) as refused:
        option.value(0)
    assert str(refused.value) == "--some-count=0: must be at least 1. Leave it out"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.flag)
def test_what_is_shown_has_a_help_text(option: Option) -> None:
    assert option.hidden or option.help.endswith(".")


def test_help_is_shown_by_sections() -> None:
    titles = [section.title for section in SECTIONS]
    assert len(set(titles)) == len(titles)
    text = click.testing.CliRunner().invoke(_program(), ["--help"]).output
    places = [text.index(f"{title}:") for title in titles]
    assert places == sorted(places)
    assert "Other options:" in text
    assert "](" not in text and "`" not in text


def _program() -> click.Command:
    from edl.launch.__main__ import run

    return run


@pytest.mark.parametrize(
    ("markdown_text", "text"),
    [
        ("See [state.md](state.md).", "See docs/state.md."),
        ("a [dropped](slots.md) slot of `--x`", "a dropped (docs/slots.md) slot of --x"),
        ("Kind, see [below](#the-store).", "Kind, see docs/launcher.md."),
        ("see [Memory](checkpoints.md#memory).", "see Memory (docs/checkpoints.md)."),
    ],
)
def test_markdown_for_a_terminal(markdown_text: str, text: str) -> None:
    assert plain_text(markdown_text) == text


@pytest.mark.parametrize("row", [*TORCHRUN_ROWS, *PADDLE_ROWS], ids=lambda row: row.option)
def test_every_option_of_other_launchers_leads_to_an_entry(row: Row) -> None:
    assert entry_of(row.option) in OPTIONS
    flags = [part.strip() for part in row.becomes.split(",") if part.strip().startswith("--")]
    assert [flag for flag in flags if flag not in BY_SPELLING] == []


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.same_as], ids=lambda one: one.flag)
def test_another_launchers_name_is_that_of_an_option_of_ours(option: Option) -> None:
    assert BY_SPELLING[option.same_as].variable and not option.variable
    rows = {entry_of(row.option).flag: row for row in (*TORCHRUN_ROWS, *PADDLE_ROWS)}
    assert rows[option.flag].becomes == option.same_as, "the drop-in table says the same"


def test_the_page_names_what_launchers_must_agree_on() -> None:
    _, found, rest = PAGE.read_text().partition("**All launchers of a job must agree**")
    assert found
    told = rest.partition("\n\n")[0]
    by_subject = ("Batch and learning rate", "Comparing the state", "Where nodes come from")
    summed_up = {
        name for section in SECTIONS if section.title in by_subject for one in section.options for name in one.names
    }
    spec = JobSpec(JobId("job"), NodeRange(1, 1), servers=Training())
    assert [flag for flag in agreed(spec) if f"`{flag}`" not in told and flag not in summed_up] == []
    assert all(option.flag in agreed(spec) for kind in (Timeouts, SlotRules, Training) for option in of_record(kind))
