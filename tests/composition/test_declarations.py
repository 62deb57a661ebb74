"""What is declared of capabilities is what run files and pipelines do, and what the page says."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from bireme.capabilities import CAPABILITIES, NOT_YET, Capability, exclusion, pairs, settings_of, used_by
from bireme.errors import BiremeError
from bireme.report.composition import composition_page, excluded_pairs
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from bireme.train.run_file import load_run_file
from bireme.train.run_file.checks import value_of
from tests.support.command import bireme

ROOT = Path(__file__).parents[2]
EVERY = tuple(CAPABILITIES.values())


def sets_of(*capabilities: Capability) -> list[str]:
    return [f"{key}={value}" for key, value in settings_of(capabilities).items()]


def test_every_schedule_that_the_engine_runs_is_a_capability() -> None:
    runs = {name for name, one in SCHEDULES.items() if one.rule is not Rule.STASHED}
    assert {one.name for one in EVERY if one.axis == "schedule"} == runs


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_settings_of_a_capability_switch_it_on_and_the_usual_run_file_does_not(name: str) -> None:
    run = load_run_file(None, sets_of(CAPABILITIES[name]))
    assert name in used_by(partial(value_of, run))
    assert name not in used_by(partial(value_of, load_run_file(None, [])))


def test_a_pair_that_is_not_excluded_is_a_run_file_that_uses_both() -> None:
    for one, other in pairs(EVERY):
        if exclusion(one.name, other.name) is None:
            used = used_by(partial(value_of, load_run_file(None, sets_of(one, other))))
            assert {one.name, other.name} <= used.keys(), (one.name, other.name)


def test_an_excluded_pair_is_refused_with_its_reason() -> None:
    for one, other, reason in excluded_pairs():
        with pytest.raises(BiremeError, match=re.escape(f"{reason} Leave out one of the two.")):
            load_run_file(None, sets_of(one, other))


def test_exclusions_name_capabilities_of_other_axes_and_each_pair_once() -> None:
    found = [(one.name, other) for one in EVERY for other in one.excludes] + list(NOT_YET)
    assert all(CAPABILITIES[one].axis != CAPABILITIES[other].axis for one, other in found)
    assert len({frozenset(pair) for pair in found}) == len(found) == len(excluded_pairs())


def test_the_document_has_every_pair_once_and_what_switches_it_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = bireme(capsys, "capabilities", "--json")
    assert result.status == 0
    document = json.loads(result.out)
    assert [one["name"] for one in document["capabilities"]] == list(CAPABILITIES)
    assert len(document["pairs"]) == len(list(pairs(EVERY)))
    for pair in document["pairs"]:
        assert pair["excluded"] == exclusion(pair["a"], pair["b"])
        if pair["excluded"] is None:
            load_run_file(None, [f"{key}={value}" for key, value in pair["settings"].items()])


def test_the_matrix_fits_a_terminal_and_names_give_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "capabilities")
    assert result.status == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(name in line for line in lines) for name in CAPABILITIES)

    result = bireme(capsys, "capabilities", "1f1b", "stream", "mixture")
    assert result.status == 0
    assert "--set plan.schedule=1f1b" in result.out
    assert "streaming=true" in result.out

    one, other, reason = excluded_pairs()[0]
    result = bireme(capsys, "capabilities", one.name, other.name)
    assert (result.status, reason in result.err) == (2, True)
    assert "Did you mean 'quorum'?" in bireme(capsys, "capabilities", "quorums").err


def test_the_page_is_what_is_declared() -> None:
    page = (ROOT / "docs" / "composition.md").read_text()
    assert page == composition_page(), "bireme capabilities --markdown > docs/composition.md"
