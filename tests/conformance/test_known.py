"""What a run comes to in the light of what is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.conformance import said
from harness.conformance.exits import Exit, worst
from harness.conformance.known import BadKnown, Decision, KnownCase, KnownCases, decided, known_for, load_known
from harness.conformance.stream import ConformanceRun
from harness.expectations import Kind, Standing
from harness.verdicts import Verdict
from tests.conformance.made_up import BACK, GRANT, TOGETHER, header, result, run

EVERY = (GRANT, BACK, TOGETHER)


def known(*entries: KnownCase) -> KnownCases:
    return KnownCases(subject="Nixl*", versions=["0.32.*"], known=list(entries))


def entry(case: str, kind: Kind = Kind.FAILING, **more: object) -> KnownCase:
    return KnownCase(case=case, kind=kind, reason="the deadline is overwritten", **more)


def decision(made: ConformanceRun, *entries: KnownCase, allow_known: bool = False) -> Decision:
    return decided(made, known(*entries), allow_known=allow_known, every=EVERY)


PASSED, FAILED = result(GRANT), result(BACK, Verdict.FAIL)


@pytest.mark.parametrize(
    ("made", "entries", "code"),
    [
        (run(PASSED), [], 0),
        (run(PASSED, result(BACK, None)), [], 0),
        (run(PASSED, FAILED), [], 1),
        (run(PASSED, FAILED), [entry(BACK)], 1),  # known, and a failure all the same
        (run(PASSED, FAILED), [entry(GRANT, Kind.FLAKY)], 1),
        (run(PASSED, FAILED), [entry(BACK, Kind.FLAKY)], 0),
        (run(PASSED, result(BACK, Verdict.INCONCLUSIVE)), [], 2),
        (run(PASSED, result(BACK, Verdict.INCONCLUSIVE)), [entry(BACK)], 2),
        (run(PASSED, result(BACK, Verdict.INCONCLUSIVE)), [entry(BACK, Kind.FLAKY)], 0),
        (run(), [], 2),  # no case was run
        (run(result(GRANT, None)), [], 2),  # nothing applies
        (run(PASSED), [entry(GRANT, Kind.FLAKY)], 2),  # nothing decides
        (run(PASSED, complete=False), [], 2),  # cut short
        (run(PASSED, FAILED, complete=False), [], 1),  # what it has seen by then is enough
        (run(PASSED, cases=[GRANT, BACK]), [], 2),  # a footer, and a case without a result
        (run(PASSED), [entry(GRANT)], 3),  # stale
        (run(PASSED, FAILED), [entry(GRANT)], 3),
        (run(PASSED), [entry("KVC-LEASE-003.renamed")], 3),  # unmatched
        (run(PASSED), [entry(BACK)], 0),  # its case exists, and was not chosen
        (run(PASSED, result(BACK, None)), [entry(BACK)], 3),  # its case does not apply any more
        (run(PASSED, result(BACK, None)), [entry("KVC-*")], 3),
        (run(FAILED, result(TOGETHER, None)), [entry("KVC-*")], 1),
        (run(PASSED, result(BACK, Verdict.ERROR)), [], 70),
        (run(PASSED, FAILED, result(TOGETHER, Verdict.ERROR)), [entry(GRANT)], 70),
        (run(PASSED, result(BACK, Verdict.ERROR)), [entry(BACK, Kind.FLAKY)], 70),
    ],
)  # fmt: skip
def test_the_worst_decides(made: ConformanceRun, entries: list[KnownCase], code: int) -> None:
    assert decision(made, *entries).exit == code


@pytest.mark.parametrize(
    ("made", "entries", "code"),
    [
        (run(PASSED, FAILED), [entry(BACK)], 0),
        (run(FAILED), [entry(BACK)], 0),
        (run(PASSED, FAILED), [], 1),
        (run(result(GRANT, Verdict.FAIL), FAILED), [entry(BACK)], 1),
        (run(PASSED), [entry(GRANT)], 3),
        (run(FAILED, complete=False), [entry(BACK)], 2),
    ],
)  # fmt: skip
def test_known_failures_can_be_allowed_and_nothing_else(
    made: ConformanceRun, entries: list[KnownCase], code: int
) -> None:
    assert decision(made, *entries, allow_known=True).exit == code


def test_each_result_has_its_standing_and_the_entry_that_speaks_of_it() -> None:
    made = run(PASSED, FAILED, result(TOGETHER, None))
    stood = decision(made, entry("KVC-LEASE-003.*"), entry("KVC-*")).stood
    assert [s.standing for s in stood] == [Standing.STALE, Standing.KNOWN, Standing.NOT_APPLICABLE]
    assert [s.known.case if s.known else "" for s in stood] == ["KVC-*", "KVC-LEASE-003.*", "KVC-*"]


def test_expectations_hold_for_a_subject_and_its_versions() -> None:
    assert known().speaks_of(header(subject="NixlPullConnector"))
    assert not known().speaks_of(header(subject="LMCacheConnector"))
    assert not known().speaks_of(header(versions={"vllm": "0.33.0"}))
    assert known().speaks_of(header(versions={"nixl": "1.0", "vllm": "0.32.5"}))
    assert not known().speaks_of(header(versions={}))
    assert KnownCases(subject="*", versions=["*"]).speaks_of(header(versions={}))


def test_an_entry_can_hold_for_some_of_the_versions() -> None:
    made = run(PASSED, FAILED)
    assert decision(made, entry(BACK, versions=["0.32.0"]), allow_known=True).exit == 0
    assert decision(made, entry(BACK, versions=["0.32.1"]), allow_known=True).exit == 1
    assert decision(run(PASSED), entry(GRANT, versions=["0.32.1"])).exit == 0  # not stale: not its version


def test_of_twins_each_must_be_caught_and_nothing_is_known() -> None:
    caught, missed = result(GRANT, twin="early"), result(GRANT, Verdict.FAIL, twin="never")
    assert decision(run(caught, twins=True), entry(GRANT)).exit == 0
    both = decision(run(caught, missed, twins=True), entry(GRANT), allow_known=True)
    assert both.exit == 1
    assert "not caught: KVC-LEASE-001.grant, twin never" in said.reasons(both)[0]


def test_several_runs_come_to_the_worst() -> None:
    assert worst([]) is Exit.INCONCLUSIVE
    assert worst([Exit.CONFORMANT, Exit.INCONCLUSIVE]) is Exit.INCONCLUSIVE
    assert worst([Exit.NOT_CONFORMANT, Exit.STALE, Exit.INCONCLUSIVE]) is Exit.STALE
    assert worst([Exit.OUR_FAULT, Exit.STALE]) is Exit.OUR_FAULT


def test_expectations_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'subject = "NixlConnector"\nversions = ["0.32.0"]\n[[known]]\ncase = "KVC-*"\nkind = "flaky"\n'
        'reason = "races"\nlink = "https://example.org/1"\nversions = ["0.32.0"]\n'
    )
    found = load_known(str(path))
    assert found.known == [KnownCase(case="KVC-*", kind=Kind.FLAKY, reason="races", link="https://example.org/1",
                                     versions=["0.32.0"])]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "missing required field `subject`"),
        ('subject = ""\nversions = []', "length >= 1"),
        ('subject = "x"\nversions = "0.32"', "Expected `array`"),
        ('subject = "x"\nversions = []\n[[known]]\ncase = "y"', "missing required field `reason`"),
        ('subject = "x"\nversions = []\n[[known]]\ncase = "y"\nreason = ""', "length >= 1"),
        ('subject = "x"\nversions = []\n[[known]]\ncase = "y"\nreason = "z"\ncheck = "a"', "unknown field `check`"),
        ('subject = "x"\nversions = []\n[[known]]\ncase = "y"\nreason = "z"\nkind = "odd"', "Invalid enum value"),
        ("subject = ", "Invalid value"),
        (None, "no such file"),
    ],
)
def test_expectations_that_cannot_be_used_are_one_line_and_78(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadKnown, match=problem) as refused:
        load_known(str(path))
    assert refused.value.exit_code == Exit.CONFIGURATION == 78


def test_expectations_that_come_with_the_package_can_be_read() -> None:
    assert known_for(header(subject="nobody's")) is None
    with pytest.raises(BadKnown, match="unknown"):
        load_known("nothing")


def test_a_run_in_words() -> None:
    made = run(PASSED, FAILED, result(TOGETHER, None), complete=False)
    unexpected = decided(made, None, every=EVERY)
    assert said.sentence(unexpected) == (
        "NixlConnector (vllm 0.32.0): not conformant; of 3 cases, 1 passed, 1 failed and 1 does not apply."
    )
    assert said.reasons(unexpected) == [
        "1 failure (there are no expectations for this version): KVC-LEASE-003.never-back.",
        "The results have no footer: the run was cut short.",
    ]
    assert "1 failure that nobody expected" in said.reasons(decision(made))[0]
    assert "--allow-known" in said.reasons(decision(run(PASSED, FAILED), entry(BACK)))[0]
    many = run(*(result(f"KVC-LEASE-00{n}.x", Verdict.FAIL) for n in range(9)))
    assert said.reasons(decision(many))[0].endswith("KVC-LEASE-005.x and 3 more.")


def test_every_run_that_is_not_conformant_says_why() -> None:
    for verdict in (*Verdict, None):
        for entries in ([], [entry(GRANT)], [entry("KVC-LEASE-003.renamed")]):
            came = decision(run(result(GRANT, verdict), cases=[GRANT, BACK]), *entries)
            assert said.reasons(came)


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        ({"connector": "my.module"}, "--connector my.module"),
        ({"connector": "a file.py"}, "--connector 'a file.py'"),
        (
            {"kv_transfer_config": {"kv_connector": "Nixl's"}},
            """--kv-transfer-config '{"kv_connector":"Nixl'"'"'s"}'""",
        ),
        ({"strict": True, "other": None, "more": False}, "--strict"),
        ({}, ""),
    ],
)
def test_a_case_can_be_run_again(configuration: dict[str, object], words: str) -> None:
    command = said.again(header(configuration=configuration), GRANT)
    assert command == " ".join(filter(None, ["pdproof conform", words, f"--case {GRANT} --seed 2"]))
    assert said.again(header(twins=True, configuration={}), GRANT).endswith("--twins")
