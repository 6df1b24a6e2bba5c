"""Every rule of the catalogue has a test that carries its id, or says why it has none; and the list shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.commands import rule_table
from harness.commands.list import command
from harness.rules import Rule, catalogue, checkout_tests, marked_tests

TESTS = Path(__file__).parents[1]
RULES = {rule.id: rule for rule in catalogue()}
MARKED = marked_tests(TESTS)
ROWS = {
    "LEASE": 13, "HB": 9, "REL": 7, "XFER": 5, "HSK": 4, "CLK": 8, "IDEM": 19, "MEM": 11, "LOCK": 5, "SHDW": 6,
    "ROUT": 2, "OBS": 2,
}  # fmt: skip
"""Of the first edition. Rows are added, never taken away."""


def strays(rules: dict[str, Rule], marked: dict[str, list[str]]) -> Iterator[str]:
    """Yield what is wrong between the catalogue and the marks."""
    for rule_id, tests in marked.items():
        if rule_id not in rules:
            yield f"{rule_id}: no such rule, marked at {', '.join(tests)}"
        elif rules[rule_id].untested:
            yield f"{rule_id}: has tests, so the reason {rules[rule_id].untested!r} is stale: {', '.join(tests)}"
    for rule in rules.values():
        if rule.id not in marked and not rule.untested:
            yield f"{rule.id}: no test carries it, and harness/catalogue.toml does not say why"


def test_every_rule_has_a_test_or_a_reason_and_none_has_both() -> None:
    assert list(strays(RULES, MARKED)) == []


@pytest.mark.parametrize(
    ("rules", "marked", "words"),
    [
        ({}, {"KVC-LEASE-999": ["a::b"]}, "no such rule"),
        ({"KVC-HB-001": "because"}, {"KVC-HB-001": ["a::b"]}, "stale"),
        ({"KVC-HB-001": ""}, {}, "does not say why"),
    ],
)
def test_each_stray_is_caught(rules: dict[str, str], marked: dict[str, list[str]], words: str) -> None:
    rows = {i: Rule(id=i, level="M", faces=[], source=[], rule="", untested=why) for i, why in rules.items()}  # type: ignore[arg-type]
    (found,) = strays(rows, marked)
    assert words in found


def test_the_catalogue_is_whole() -> None:
    ids = [rule.id for rule in catalogue()]
    assert len(set(ids)) == len(ids)
    groups = {group: sum(rule.group == group for rule in catalogue()) for group in ROWS}
    assert all(groups[group] >= count for group, count in ROWS.items()), groups
    assert sum(groups.values()) == len(ids)
    for rule in catalogue():
        assert rule.rule
        assert rule.faces
        assert rule.id.split("-")[2] == f"{int(rule.id.split('-')[2]):03}"


SOURCE = '''
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.rule("KVC-A-001")]

@pytest.mark.rule("KVC-B-001", "KVC-B-002")
@pytest.mark.slow
async def test_one(): ...

def test_two(): ...

@pytest.mark.rule("KVC-C-001")
class TestThree:
    pytestmark = pytest.mark.rule("KVC-C-002")
    @pytest.mark.rule("KVC-C-003")
    def test_method(self): ...
    def helper(self): ...

TestFour = pytest.mark.rule("KVC-D-001")(Machine.TestCase)

@pytest.mark.other("KVC-E-001")
def test_five(): """KVC-E-002"""

@pytest.mark.rule("KVC-F-001")
def helper(): ...
'''


def test_marks_are_found_wherever_pytest_takes_them(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "test_x.py").write_text(SOURCE)
    found = marked_tests(tmp_path)
    at = "below/test_x.py::"
    assert found.pop("KVC-A-001") == [
        f"{at}{n}" for n in ("test_one", "test_two", "TestThree::test_method", "TestFour", "test_five")
    ]
    method = [f"{at}TestThree::test_method"]
    assert found == {
        "KVC-B-001": [f"{at}test_one"], "KVC-B-002": [f"{at}test_one"], "KVC-C-001": method, "KVC-C-002": method,
        "KVC-C-003": method, "KVC-D-001": [f"{at}TestFour"],
    }  # fmt: skip


def listed(*arguments: str) -> str:
    done = CliRunner().invoke(command, ["rules", *arguments])
    assert done.exit_code == 0
    return done.output


def test_the_list_counts_the_tests_of_each_rule_or_says_why_there_are_none() -> None:
    rows = {line.split()[0]: line.split() for line in listed().splitlines() if line.startswith(" KVC-")}
    assert rows.keys() == RULES.keys()
    assert rows["KVC-ROUT-002"][1:4] == ["M", "R", "B"]
    assert rows["KVC-ROUT-002"][-1] == str(len(MARKED["KVC-ROUT-002"]))
    assert "not built:" in " ".join(rows["KVC-SHDW-006"])


def test_the_long_list_names_them() -> None:
    text = "".join(listed("-v").split())
    assert all("".join(name.split()) in text for name in ("test_a_failed_request_is_sent_to_nobody_else",))
    assert "test_a_failed_request_is_sent_to_nobody_else" not in listed()


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout_tests() == TESTS
    monkeypatch.setattr(rule_table, "checkout_tests", lambda: None)
    text = listed()
    assert "This is no checkout" in text
    assert "KVC-LEASE-001" in text
