"""The suite of black-box cases as a whole: what it covers, how cases are chosen, and a run from end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cases.bench import Bench, Deployment, Described
from harness.cases.makers import LocalMaker, ReferenceMaker, maker_of
from harness.cases.metrics import summed
from harness.cases.registry import CASES, chosen
from harness.cases.runner import Outcome, Plan, run_cases
from harness.cases.steps import FILE, Mark, StepLog, read_steps
from harness.cases.terms import FULL, SMALL, Need, PairTerms, Pool, Size, pool_tokens, spare_share
from harness.checks import judge
from harness.commands.conform import command
from harness.content import Oracle
from harness.errors import BadInput, BadRunFolder, StartFailed
from harness.rules import catalogue
from harness.run_folder import RunFolder
from harness.verdicts import Verdict
from reference_impl.announcement import Announcement
from tests.harness import test_cases_faults, test_cases_leases, test_cases_release
from tests.harness.case_histories import CaseHistory

CLEAN: dict[str, Callable[[], CaseHistory]] = (
    test_cases_leases.CLEAN | test_cases_release.CLEAN | test_cases_faults.CLEAN
)
INVARIANTS = {"S1", "S2", "S3", "S4", "S5", "S6", "L1", "L2", "L3", "L4", "L5", "L6", "C1", "C2", "C3", "R1", "R2",
              "O1", "O2", "K1"}  # fmt: skip


def test_every_case_names_rules_of_the_catalogue() -> None:
    known = {rule.id for rule in catalogue()} | INVARIANTS
    assert [(c.name, r) for c in CASES.values() for r in c.rules if r not in known] == []


def test_at_least_twenty_rules_of_the_catalogue_have_a_case() -> None:
    assert len({rule for case in CASES.values() for rule in case.rules} - INVARIANTS) >= 20


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_twin_whose_check_it_makes_and_its_checks_name_its_own_rules(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    results = CLEAN[name]().judged(tmp_path / "run")
    assert case.twins
    assert {twin.fails for twin in case.twins} <= set(results)
    own = [r for r in results.values() if r.check not in {"content", "serves-after", "conserved", "machine"}]
    assert {rule for r in own for rule in r.rules} <= set(case.rules)


def test_cases_are_chosen_by_name_beginning_or_pattern() -> None:
    assert [c.name for c in chosen(("surge",))] == ["surge"]
    assert len(chosen(("two_turn",))) == 4
    assert {c.name for c in chosen(("*restart", "surge"))} == {"p_restart", "d_restart", "surge"}
    assert chosen(("sur",)) == []
    assert len(chosen(())) == len(CASES)


def test_a_selection_that_fits_nothing_is_wrong_usage(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, ["--case", "surge", "--case", "no-such-case", "--out", str(tmp_path / "out")])
    assert ran.exit_code == 64
    assert "no-such-case" in ran.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_wrong_usage(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, ["--case", "surge", "--out", str(tmp_path)])
    assert ran.exit_code == 64


def test_an_unknown_target_is_told_as_one() -> None:
    with pytest.raises(BadInput, match="no-such-target"):
        maker_of("no-such-target")


def test_the_list_names_cases_rules_and_twins() -> None:
    ran = CliRunner().invoke(command, ["--list", "--case", "d_crash"])
    assert ran.exit_code == 0
    assert "KVC-LEASE-009" in ran.output
    assert "twin long_lease" in ran.output


def test_pools_hold_what_cases_need_of_them() -> None:
    for size in (SMALL, FULL):
        longest = size.input_tokens + size.output_tokens
        assert pool_tokens(Pool.TIGHT, size) >= 3 * longest
        assert 4 * size.input_tokens > pool_tokens(Pool.TIGHT, size) - size.input_tokens  # the fillers take all of it
        assert pool_tokens(Pool.ROOMY, size) >= 8 * longest
        assert spare_share(Pool.ROOMY, size) < size.input_tokens / pool_tokens(Pool.ROOMY, size)


def test_terms_say_what_a_target_must_be_able_to_do() -> None:
    assert PairTerms().needs() == set()
    assert PairTerms(pool=Pool.TIGHT).needs() == {Need.TERMS}
    assert PairTerms(decode_clock_offset_s=5).needs() == {Need.CLOCK}
    assert PairTerms(design="single-timeout").needs() == {Need.DESIGNS}
    assert PairTerms(clock_correction=False).needs() == {Need.DESIGNS}
    case = CASES["d_crash"]
    assert Need.TERMS in case.wants(case.twins[0])


def test_metrics_are_summed_over_labels_and_nothing_else_is_kept() -> None:
    text = "\n".join([
        "# HELP vllm:a about", 'vllm:a_total{engine="0"} 1.0', 'vllm:a_total{engine="1"} 2.5', "vllm:a_created 9",
        'vllm:b_bucket{le="1"} 4', "vllm:b_sum 3e2", "python_gc 7", "pdproof:c 1", "vllm:odd what",
    ])  # fmt: skip
    assert summed(text) == {"vllm:a_total": 3.5, "vllm:b_sum": 300.0, "pdproof:c": 1.0}


def test_steps_that_were_cut_short_are_not_judged(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.add(Mark(t_ns=1, name="one"))
    log.add(Mark(t_ns=2, name="two"))
    log.close("hindered by nothing")
    steps, end = read_steps(tmp_path)
    assert [s.t_ns for s in steps] == [1, 2]
    assert end.hindered == "hindered by nothing"
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(BadRunFolder, match="cut short"):
        read_steps(tmp_path)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(BadRunFolder, match="cut short"):
        read_steps(tmp_path)


class Unable(LocalMaker):  # its methods have the interface's arguments, and use none
    """A target that can do nothing, and must never be asked to."""

    name = "unable"

    def offers(self) -> set[Need]:
        return {Need.METRICS}

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:  # noqa: ARG002
        raise AssertionError("it was asked for servers")

    def oracle(self, announcement: Announcement) -> Oracle | None:  # noqa: ARG002
        return None

    def describe(self) -> Described:
        raise AssertionError

    def environment(self, faults: Path) -> dict[str, str]:  # noqa: ARG002
        return {}


def run(names: list[str], tmp_path: Path, maker: Unable | ReferenceMaker, *, twins: bool = False) -> list[Outcome]:
    plan = Plan(size=SMALL, seed=3, out=tmp_path / "out", twins=twins, command=[])
    cases = [CASES[name] for name in names]
    return asyncio.run(run_cases(cases, maker, plan, lambda _: None, lambda _: None))


def test_a_case_whose_need_is_missing_is_not_run_and_says_so(tmp_path: Path) -> None:
    outcomes = run(["d_crash", "stale_handoff"], tmp_path, Unable())
    assert {(o.verdict, o.folder) for o in outcomes} == {(None, "")}
    assert "processes" in next(o.reason for o in outcomes if o.case == "d_crash")


class Failing(Unable):
    """A target whose servers never come up."""

    name = "failing"

    def offers(self) -> set[Need]:
        return set(Need)

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:  # noqa: ARG002
        raise StartFailed("no such server")


def test_a_pair_that_does_not_come_up_is_an_error_of_its_case_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = run(["undisturbed", "stale_handoff"], tmp_path, Failing())
    assert [o.verdict for o in outcomes] == [Verdict.ERROR, Verdict.ERROR]
    assert "no such server" in outcomes[0].reason


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.rule(
    "KVC-LEASE-001", "KVC-LEASE-002", "KVC-REL-001", "KVC-REL-007", "KVC-OBS-001", "KVC-OBS-002", "KVC-XFER-001"
)  # fmt: skip
def test_the_reference_passes_a_few_cases_and_their_folders_can_be_judged_again(tmp_path: Path) -> None:
    outcomes = run(["undisturbed", "no_remote_decode", "rejected_at_door"], tmp_path, ReferenceMaker())
    for outcome in outcomes:
        assert outcome.verdict is Verdict.PASS, [r for r in outcome.results if r.verdict is not Verdict.PASS]
        assert judge(RunFolder(Path(outcome.folder))) == outcome.results


@pytest.mark.slow
@pytest.mark.nixl
def test_their_twins_are_caught(tmp_path: Path) -> None:
    outcomes = run(["undisturbed", "no_remote_decode"], tmp_path, ReferenceMaker(), twins=True)
    assert [(o.twin, o.reason) for o in outcomes if o.verdict is not Verdict.PASS] == []
    assert {o.twin for o in outcomes} >= {"wrong_token", "no_completions", "kept"}


@pytest.mark.slow
@pytest.mark.nixl
async def test_servers_that_somebody_else_runs_are_put_to_the_cases_that_need_nothing_but_http(tmp_path: Path) -> None:
    bench = Bench(ReferenceMaker(), tmp_path / "theirs", lambda _: None)
    try:
        pair = await bench.pair(PairTerms(), SMALL)
        description = tmp_path / "theirs.toml"
        description.write_text(
            f'name = "theirs"\nmodel = "{pair.said.model}"\nprefill_url = "{pair.url_of("p0")}"\n'
            f'decode_url = "{pair.url_of("d0")}"\nprefill_metrics_url = "{pair.url_of("p0")}/metrics"\n'
            f'decode_metrics_url = "{pair.url_of("d0")}/metrics"\n'
            '[terms]\nlease_s = 6\nload_failure_policy = "recompute"\nbidirectional = false\n'
        )
        plan = Plan(size=SMALL, seed=4, out=tmp_path / "out", twins=False, command=[])
        cases = chosen(("undisturbed", "rejected_at_door", "d_crash", "stale_handoff", "two_turn_ahead_fail"))
        outcomes = await run_cases(cases, maker_of(str(description)), plan, lambda _: None, lambda _: None)
    finally:
        await bench.close()
    found = {o.case: o for o in outcomes}
    assert {name for name, o in found.items() if o.verdict is None} == {
        "d_crash",
        "stale_handoff",
        "two_turn_ahead_fail",
    }
    for name in ("undisturbed", "rejected_at_door"):
        results = {r.check: r for r in found[name].results}
        assert {r.verdict for r in results.values()} == {Verdict.PASS}, found[name].results
        assert "with a golden run on both servers" in results["content"].found
        assert "could not be judged" not in results["content"].found
