"""The tutorial for third parties, followed to the letter: from an empty file to a connector that passes everything."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.conformance.registry import CASES
from harness.conformance.results import CaseResult
from harness.conformance.stream import ConformanceRun, read_results
from harness.conformance.subject import Capability
from harness.verdicts import Verdict
from tests.repository.test_docs import BIN, ROOT, blocks

PAGE = "docs/connectors.md"
TOY = ROOT / "examples" / "toy_connector"
CLAIMS = {Capability.LEASES, Capability.PREFIX_HITS, Capability.METRICS}


class Ran(NamedTuple):
    line: str
    code: int
    wanted: int
    said: str


class Tutorial(NamedTuple):
    folder: Path
    ran: list[Ran]

    def run(self, name: str) -> ConformanceRun:
        return read_results(self.folder / "out" / name / "results.jsonl")

    def results(self, name: str) -> dict[str, CaseResult]:
        return {result.case: result for result in self.run(name).results}

    def named(self, name: str, verdict: Verdict | None) -> set[str]:
        return {case for case, result in self.results(name).items() if result.verdict is verdict}

    def output_of(self, part: str) -> str:
        return next(ran.said for ran in self.ran if part in ran.line)


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    folder = tmp_path_factory.mktemp("tutorial")
    shutil.copytree(TOY, folder / "examples" / "toy_connector", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site = folder / "site"
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}", "PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PYTHONPATH": str(site),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    if importlib.util.find_spec("setuptools"):
        environment["PIP_NO_BUILD_ISOLATION"] = "0"  # pip's own way to say: no isolation, and no network
    ran = []
    for block in blocks(PAGE):
        kind, _, value = block.mark.partition("=")
        if kind == "file":
            (folder / value).write_text(block.text)
        elif kind == "from":
            assert block.text in (TOY / "steps" / value).read_text(), block.text
        elif kind == "run":
            python = f"{sys.executable} -c {shlex.quote(block.text)}"
            lines = block.text.splitlines() if block.language == "sh" else [python]
            for number, line in enumerate(lines, 1):
                done = subprocess.run(
                    ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=100,
                    check=False,
                )  # fmt: skip
                wanted = int(value or 0) if number == len(lines) else 0
                ran.append(Ran(line, done.returncode, wanted, done.stdout + done.stderr))
    return Tutorial(folder, ran)


pytestmark = pytest.mark.timeout(300)


def test_every_command_ends_as_the_page_says(tutorial: Tutorial) -> None:
    assert [ran for ran in tutorial.ran if ran.code != ran.wanted] == []
    assert [ran.wanted for ran in tutorial.ran if "pdproof conform" in ran.line] == [78, 2, 1, 1, 1, 0, 0]


def test_every_shell_block_is_run_or_needs_what_is_not_here() -> None:
    idle = [block.text for block in blocks(PAGE) if block.language == "sh" and not block.mark.startswith("run")]
    assert all("kv-transfer-config" in text for text in idle)
    assert len(idle) == 1


def test_an_empty_file_is_no_subject(tutorial: Tutorial) -> None:
    assert "my_connector has no function make_subject" in tutorial.output_of("out/empty")


def test_the_page_shows_the_first_step_whole() -> None:
    shown = [block.text for block in blocks(PAGE) if block.mark == "file=my_connector.py"]
    assert shown == ["", (TOY / "steps" / "step_1.py").read_text()]


def test_step_1_comes_to_no_verdict(tutorial: Tutorial) -> None:
    assert tutorial.named("step-1", Verdict.FAIL) == set()
    open_ones = tutorial.named("step-1", Verdict.INCONCLUSIVE)
    assert len(open_ones) > len(tutorial.named("step-1", Verdict.PASS))
    assert "handed nothing over" in tutorial.results("step-1")["KVC-LEASE-001.grant"].found


RED = {
    "step-2": {
        "KVC-LEASE-005.expiry": "its blocks are free when the lease is over", "KVC-HB-001.from-arrival": "is renewed",
        "KVC-REL-006.damaged": "R1", "KVC-XFER-002.recompute": "L3",
    },
    "step-3": {
        "KVC-HB-001.from-arrival": "before it is scheduled", "KVC-LEASE-010.queued": "its lease lives after 1 lease",
        "KVC-REL-006.damaged": "R1: p.1 ended: KeyError: ''", "KVC-LEASE-005.late": "R1",
    },
    "step-4": {
        "KVC-LEASE-006.all-looked-at": "the one behind it", "KVC-LEASE-010.any-id": "C1",
        "KVC-LEASE-010.unlike-durations": "agree on the terms", "KVC-XFER-002.reused": "S2",
        "KVC-XFER-003.aborted": "nothing lands in the blocks of those who come next",
        "KVC-XFER-004.never-ends": "within 120 s", "KVC-HSK-001.unlike": "nothing is read",
    },
}  # fmt: skip
GREEN = {
    "step-2": {"KVC-XFER-001.content", "KVC-XFER-001.again", "KVC-REL-001.read", "KVC-REL-003.hit"},
    "step-3": {"KVC-LEASE-001.grant", "KVC-LEASE-005.expiry", "KVC-LEASE-002.aborts", "KVC-LEASE-007.idle"},
    "step-4": {"KVC-HB-001.from-arrival", "KVC-LEASE-010.queued", "KVC-REL-006.damaged", "KVC-LEASE-009.crash"},
}


@pytest.mark.parametrize("step", RED)
def test_each_step_breaks_what_the_page_says_and_keeps_the_rest(tutorial: Tutorial, step: str) -> None:
    results = tutorial.results(step)
    assert {case for case in RED[step] if results[case].verdict is not Verdict.FAIL} == set()
    assert {case: text for case, text in RED[step].items() if text not in results[case].found} == {}
    assert {case: results[case].found for case in GREEN[step] if results[case].verdict is not Verdict.PASS} == {}


def test_the_page_names_all_that_is_left_in_the_last_step(tutorial: Tutorial) -> None:
    named = set(re.findall(r"^\| `(KVC-\S+)` \|", (ROOT / PAGE).read_text(), re.M))
    assert tutorial.named("step-4", Verdict.FAIL) == named == set(RED["step-4"])


def test_every_step_passes_what_those_before_it_passed(tutorial: Tutorial) -> None:
    passed = [tutorial.named(step, Verdict.PASS) for step in ("step-2", "step-3", "step-4", "toy")]
    assert len(passed[0]) < len(passed[1]) < len(passed[2]) < len(passed[3])
    assert passed[3] >= passed[2]


def test_the_toy_passes_every_case_that_its_claims_call_for(tutorial: Tutorial) -> None:
    results = tutorial.results("toy")
    asked = {name for name, case in CASES.items() if case.needs <= CLAIMS}
    assert set(results) == set(CASES)
    assert {n: r.found for n, r in results.items() if n in asked and r.verdict is not Verdict.PASS} == {}
    assert {n for n, r in results.items() if r.verdict is None} == set(CASES) - asked
    run = tutorial.run("toy")
    assert set(run.header.capabilities) == CLAIMS
    assert run.header.versions == {"toy-connector": "0.1.0"}
    assert run.unexercised == []


def test_the_toy_is_a_package_of_its_own(tutorial: Tutorial) -> None:
    assert (tutorial.folder / "site" / "toy_connector" / "connector.py").is_file()
    assert importlib.util.find_spec("toy_connector") is None


def test_a_timeline_can_be_read_as_the_page_shows_it(tutorial: Tutorial) -> None:
    printed = [" ".join(line.split()) for line in tutorial.output_of("read_results").splitlines()]
    shown = next(block.text for block in blocks(PAGE) if "breach" in block.text and not block.language)
    assert [line for line in shown.splitlines() if " ".join(line.split()) not in printed] == []


def test_what_the_third_step_says_is_what_the_page_shows(tutorial: Tutorial) -> None:
    found = tutorial.results("step-3")["KVC-REL-006.damaged"].found
    shown = next(b.text.strip() for b in blocks(PAGE) if "these did" in b.text).removesuffix(" ...")
    assert found.replace("my_connector.py", "step_3.py").startswith(shown)


def test_nothing_is_left_behind(tutorial: Tutorial) -> None:
    assert list(tutorial.folder.glob("pdproof-subject-*")) == []
