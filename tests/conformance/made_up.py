"""Results of runs that never were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.conformance.case import Level, Source
from harness.conformance.results import CaseResult, Header
from harness.conformance.stream import ConformanceRun, ResultWriter
from harness.conformance.timeline import Entry
from harness.conformance.watch import Breach
from harness.verdicts import Verdict

GRANT, BACK, TOGETHER = "KVC-LEASE-001.grant", "KVC-LEASE-003.never-back", "KVC-HB-002.together"


def header(*cases: str, subject: str = "NixlConnector", **changes: Any) -> Header:
    given = {
        "subject": subject, "versions": {"vllm": "0.32.0"}, "capabilities": ["leases", "two-turn"],
        "configuration": {"kv_transfer_config": {"kv_connector": subject}}, "seed": 2, "cases": list(cases),
        "commit": "abc1234", "machine": {"cpus": 2, "kernel": "6.1"}, "started_wall_ns": 1_764_500_000_000_000_000,
        "command": ["pdproof", "conform", "--kv-transfer-config", "{}"],
    }  # fmt: skip
    return Header(**(given | changes))


def result(case: str, verdict: Verdict | None = Verdict.PASS, **changes: Any) -> CaseResult:
    given = {
        "case": case, "rule": case.partition(".")[0], "title": f"About {case.partition('.')[2]}", "level": Level.MUST,
        "source": Source.LEASE_DOCUMENT, "verdict": verdict, "found": "what was to be seen was seen",
        "needs": ["leases"], "seconds": 0.25, "timeline": timeline(3),
    }  # fmt: skip
    return CaseResult(**(given | changes))


def timeline(entries: int) -> list[Entry]:
    return [
        Entry(t_ns=n * 50_000_000, who="p.1", what="sends", subject="d.1", detail={"says": f"heartbeat: r{n}"})
        for n in range(entries)
    ]


def breach(t_ns: int = 0) -> Breach:
    return Breach(rule="L2", what="p.1 gave r1 up 1.20 s before its lease could end", t_ns=t_ns)


def run(*results: CaseResult, complete: bool = True, **changes: Any) -> ConformanceRun:
    cases = changes.pop("cases", list(dict.fromkeys(r.case for r in results)))
    return ConformanceRun(header(*cases, **changes), list(results), complete, "made-up.jsonl")


def written(path: Path, made: ConformanceRun) -> Path:
    with ResultWriter(path, made.header) as writer:
        for each in made.results:
            writer.add(each)
        if made.complete:
            writer.finish(made.header.started_wall_ns + 1)
    return path
