"""The findings of a system: what each case said of each rule, and how that stands to what was expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from harness.cases.case import CaseInfo
from harness.errors import BadInput, BadRunFolder
from harness.expectations import Expectations, Known, Standing, expectations_for, standing, unmatched
from harness.rules import Face, Rule, catalogue
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict, worst
from reports.findings.late_turns import LateTurnRow, late_turns
from reports.summary import Summary

MANIFEST: Final = "manifest.json"
MACHINE_CHECKS: Final = {"machine", "setup"}
"""Of the machine and the case itself: they say nothing of the system."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one check of one case found."""

    case: str
    title: str
    """Of the case."""
    result: CheckResult
    standing: Standing
    known: Known | None
    reference: Verdict | None
    """What the same check found of the reference implementation; None: it was not asked."""
    command: str
    """Runs this one case again."""


class RuleFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, and all that was seen of it."""

    rule_id: str
    text: str
    level: str
    verdict: Verdict
    seen: list[Seen]
    """What failed first."""
    twins: int
    """Twins of its checks that were caught, where twins were run."""


class CaseFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    name: str
    title: str
    verdict: Verdict
    seen: list[Seen]
    folder: str


class Untried(msgspec.Struct, frozen=True):
    """A rule that no case of this run speaks of, and why."""

    rule_id: str
    text: str
    why: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be said of a system."""

    system: str
    version: str
    verdict: Verdict
    rules: list[RuleFinding]
    cases: list[CaseFinding]
    untried: list[Untried]
    late_turns: list[LateTurnRow]
    unmatched: list[Known]
    expected: bool
    """Whether there are expectations for this version."""
    unlike_production: list[str]
    versions: dict[str, str]
    machine: str
    commit: str
    size: str
    started_wall_ns: int
    twins_caught: int
    twins: int
    recovery: Summary | None

    def count(self, verdict: Verdict) -> int:
        """Return how many of the tried rules have a verdict."""
        return sum(rule.verdict is verdict for rule in self.rules)

    def standing(self, *wanted: Standing) -> list[Seen]:
        """Return every check that stands so."""
        return [seen for case in self.cases for seen in case.seen if seen.standing in wanted]


def gather(
    folder: Path, *, reference: Path | None = None, twins: Path | None = None, known: Expectations | None = None,
    recovery: Path | None = None,
) -> Findings:  # fmt: skip
    """Read the run folders below `folder`. Raises BadInput if there are none, BadRunFolder for one that is damaged."""
    runs = _runs(folder)
    if not runs:
        raise BadInput(f"{folder}: no run folder of a case lies below it; `pdproof conform --out` makes them")
    manifest = runs[0].manifest
    system = str(manifest.configuration.get("target", ""))
    names = {str(run.manifest.configuration.get("target", "")) for run in runs}
    if len(names) > 1:
        raise BadInput(f"{folder}: its cases are of several systems: {', '.join(sorted(names))}")
    known = known or expectations_for(system, manifest.versions.values())
    others = None if reference is None else _runs(reference)
    theirs = _verdicts(others or [])
    cases = [_case(run, system, known, theirs) for run in runs]
    caught, asked = _twins(twins)
    pairs = [(case.name, seen.result.check) for case in cases for seen in case.seen]
    rules = _rules(cases, caught)
    info = _info(runs[0])
    findings = Findings(
        system=system, version=_version(system, manifest.versions), verdict=Verdict.INCONCLUSIVE, rules=rules,
        cases=cases, untried=_untried(rules), late_turns=late_turns(runs, others),
        unmatched=unmatched(known, pairs, [c.name for c in cases]),
        expected=known is not None, unlike_production=list(manifest.emulated), versions=manifest.versions,
        machine=" · ".join(f"{k} {v}" for k, v in manifest.machine.items()), commit=manifest.commit,
        size=info.size, started_wall_ns=min(run.manifest.started_wall_ns for run in runs),
        twins_caught=sum(caught.values()), twins=asked, recovery=_recovery(recovery),
    )  # fmt: skip
    return msgspec.structs.replace(findings, verdict=_verdict(findings))


def _runs(folder: Path) -> list[RunFolder]:
    """Return the run folders of cases, twins left out, by name."""
    found = [RunFolder(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))]
    return [run for run in found if "case" in run.manifest.configuration and not _info(run).twin]


def _info(run: RunFolder) -> CaseInfo:
    try:
        return msgspec.convert(run.manifest.configuration["case"], CaseInfo)
    except (KeyError, msgspec.ValidationError) as error:
        raise BadRunFolder(run.path, f"manifest.json: configuration.case: {error}") from error


def _case(
    run: RunFolder, system: str, known: Expectations | None, reference: dict[tuple[str, str], Verdict]
) -> CaseFinding:
    info = _info(run)
    results = [] if run.incomplete else run.verdicts
    if not results:
        why = run.incomplete or "nobody has judged it"
        results = [CheckResult(check="complete", title="The case came to its end", rules=[],
                               verdict=Verdict.INCONCLUSIVE, found=why)]  # fmt: skip
    size = "" if info.size == "small" else f" --size {info.size}"
    command = f"pdproof conform --target {system} --case {info.name}{size}"
    seen = []
    for result in results:
        how, of_it = standing(info.name, result.check, result.verdict, known)
        if result.check in MACHINE_CHECKS and how is Standing.NEW:
            how = Standing.OPEN
        seen.append(
            Seen(
                case=info.name, title=run.manifest.title, result=result, standing=how, known=of_it,
                reference=reference.get((info.name, result.check)), command=command,
            )
        )  # fmt: skip
    verdict = worst(s.result.verdict for s in seen)
    return CaseFinding(name=info.name, title=run.manifest.title, verdict=verdict, seen=seen, folder=str(run.path))


def _verdicts(runs: Iterable[RunFolder]) -> dict[tuple[str, str], Verdict]:
    """Return the verdicts of runs, by case and check."""
    return {(_info(run).name, result.check): result.verdict for run in runs for result in run.verdicts}


def _twins(folder: Path | None) -> tuple[Counter[str], int]:
    """Return how many twins were caught, by the check that had to, and how many were run."""
    from harness.cases.registry import CASES

    caught: Counter[str] = Counter()
    asked = 0
    for path in sorted(folder.glob(f"*/{MANIFEST}")) if folder else []:
        run = RunFolder(path.parent)
        info = _info(run)
        twin = next((t for t in CASES[info.name].twins if t.name == info.twin), None) if info.name in CASES else None
        if twin is None:
            continue
        asked += 1
        failed = {r.check for r in run.verdicts if r.verdict is Verdict.FAIL}
        caught[f"{info.name}/{twin.fails}"] += twin.fails in failed
    return caught, asked


def _rules(cases: Iterable[CaseFinding], caught: Counter[str]) -> list[RuleFinding]:
    texts = {rule.id: rule for rule in catalogue()}
    by_rule: dict[str, list[Seen]] = {}
    for case in cases:
        for seen in case.seen:
            for rule_id in seen.result.rules:
                by_rule.setdefault(rule_id, []).append(seen)
    found = [_rule(rule_id, seen, texts.get(rule_id), caught) for rule_id, seen in by_rule.items()]
    order = [Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASS]
    return sorted(found, key=lambda rule: (order.index(rule.verdict), not rule.rule_id.startswith("KVC"), rule.rule_id))


def _rule(rule_id: str, seen: list[Seen], rule: Rule | None, caught: Counter[str]) -> RuleFinding:
    order = [Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASS]
    verdicts = [s.result.verdict for s in seen]
    # One case that could not decide does not take back what another has shown.
    decided = [v for v in (Verdict.FAIL, Verdict.PASS) if v in verdicts]
    verdict = decided[0] if decided else worst(verdicts)
    return RuleFinding(
        rule_id=rule_id, text=rule.rule if rule else INVARIANTS.get(rule_id, ""), level=rule.level if rule else "M",
        verdict=verdict, seen=sorted(seen, key=lambda s: order.index(s.result.verdict)),
        twins=sum(caught[f"{s.case}/{s.result.check}"] for s in seen),
    )  # fmt: skip


def _untried(rules: list[RuleFinding]) -> list[Untried]:
    tried = {rule.rule_id for rule in rules}
    found = []
    for rule in catalogue():
        if rule.id in tried or not rule.id.startswith(("KVC-LEASE", "KVC-HB", "KVC-REL", "KVC-XFER", "KVC-HSK",
                                                       "KVC-CLK", "KVC-OBS", "KVC-ROUT")):  # fmt: skip
            continue
        seen = Face.BLACK_BOX in rule.faces
        why = "no case of this run speaks of it" if seen else "it cannot be seen from outside: in process only"
        found.append(Untried(rule.id, rule.rule, why))
    return found


def _recovery(path: Path | None) -> Summary | None:
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(f"{path}: no summary of a comparison: {error}") from error


def _version(system: str, versions: dict[str, str]) -> str:
    return versions.get(system, "") or versions.get(f"{system}-cpu", "") or versions.get("pdproof", "")


def _verdict(findings: Findings) -> Verdict:
    """Fail for a failure that nobody expected, and for expectations that do not hold; known ones decide nothing."""
    if findings.standing(Standing.NEW, Standing.STALE) or findings.unmatched:
        return Verdict.FAIL
    if any(seen.result.verdict is Verdict.ERROR for case in findings.cases for seen in case.seen):
        return Verdict.ERROR
    undecided = [r for r in findings.rules if r.verdict is Verdict.INCONCLUSIVE]
    return Verdict.INCONCLUSIVE if undecided or not findings.rules else Verdict.PASS


INVARIANTS: Final = {
    "S1": "a block under a live lease or pin, or that a remote operation may still touch, is given to nobody else",
    "S2": "a reader never silently uses KV whose lease ended or whose blocks were recycled",
    "S3": "a lease shared by several readers ends only after every distinct expected reader has reported",
    "S4": "a lease ends exactly once; late, repeated, reordered and unknown completions are harmless",
    "S5": "state belongs to one incarnation of (engine, request)",
    "S6": "the reader's destination blocks are not reused while a transfer can still land in them",
    "L1": "every lease ends within a bounded time after its holder falls silent",
    "L2": "a live, connected, merely slow or queued holder never loses its lease",
    "L3": "every request leaves “waiting for remote KV” in bounded time: success, recompute or error",
    "L4": "the last read, an abort, a rejection or a full local hit ends the lease promptly, not at expiry",
    "L5": "all of this makes progress on an engine with no other traffic",
    "L6": "a dead, slow or malformed peer neither delays nor breaks healthy peers",
    "C1": "every message names the request by its holder's id",
    "R1": "no client parameter and no peer message can end an engine, a worker loop or a listener",
    "R2": "a failed load ends as the configured policy says (recompute or error) and in no other way",
    "O1": "a counter counts what its name says, once an event; expiry is apart from transport failure",
    "O2": "every lost heartbeat, notification or handshake is visible",
    "K1": "conservation: at the end of every history all blocks are free or cached",
}
"""The invariants that cases speak of, in the catalogue's words (shortened)."""
