"""Results as JUnit XML, for servers that show tests. It is green exactly where a run's exit code is 0.

JUnit knows no third verdict: what came to none is an `error` there, because `skipped` would look well. Skipped is what
does not apply, what is flaky, and a known failure where those are allowed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Final
from xml.etree import ElementTree as ET

from harness.conformance import said
from harness.conformance.exits import Exit
from harness.conformance.known import Decision, Stood
from harness.conformance.timeline import lines
from harness.expectations import Standing
from harness.verdicts import Verdict

TIMELINE_LINES: Final = 60
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, not even escaped."""


def junit(decisions: Iterable[Decision]) -> str:
    """Return a document with one suite a run."""
    root = ET.Element("testsuites", name="pdproof conformance")
    root.extend(_suite(decision) for decision in decisions)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _suite(decision: Decision) -> ET.Element:
    header = decision.run.header
    cases = [*(_case(stood, decision) for stood in decision.stood), *_others(decision)]
    began = datetime.datetime.fromtimestamp(header.started_wall_ns / 1e9, tz=datetime.UTC)
    attributes = {
        "name": _text(said.subject(header)), "tests": str(len(cases)), "timestamp": f"{began:%Y-%m-%dT%H:%M:%S}",
        "time": f"{sum(stood.result.seconds for stood in decision.stood):.3f}",
    }  # fmt: skip
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        attributes[name] = str(sum(case.find(kind) is not None for case in cases))
    suite = ET.Element("testsuite", attributes)
    properties = ET.SubElement(suite, "properties")
    told = {
        "subject": header.subject, **{f"version.{package}": version for package, version in header.versions.items()},
        "capabilities": " ".join(header.capabilities), "not exercised": " ".join(decision.run.unexercised),
        "seed": str(header.seed), "commit": header.commit, "verdict": said.sentence(decision),
    }  # fmt: skip
    for name, value in told.items():
        ET.SubElement(properties, "property", name=_text(name), value=_text(value))
    suite.extend(cases)
    return suite


def _case(stood: Stood, decision: Decision) -> ET.Element:
    result = stood.result
    case = _named(result.rule, said.named(stood), result.seconds)
    outcome, message = _outcome(stood, allow_known=decision.allow_known)
    if outcome:
        element = ET.SubElement(case, outcome, type=str(result.verdict or "n/a"), message=_text(message))
        if outcome != "skipped":
            element.text = _text(_evidence(stood, said.again(decision.run.header, result.case)))
    return case


def _outcome(stood: Stood, *, allow_known: bool) -> tuple[str, str]:
    """Return the element that says what a result came to, and its message; "" for a pass."""
    found, of_it = stood.result.found, stood.known
    known = f"{of_it.reason}{f' ({of_it.link})' if of_it.link else ''}" if of_it else ""
    if stood.result.verdict is Verdict.ERROR:
        return "error", found
    return {
        Standing.AS_EXPECTED: ("", ""),
        Standing.NEW: ("failure", found),
        Standing.KNOWN: ("skipped" if allow_known else "failure", f"known: {known}: {found}"),
        Standing.STALE: ("failure", f"expected to fail ({known}), and passed: remove the expectation"),
        Standing.FLAKY: ("skipped", f"flaky: {known}: {stood.result.verdict}: {found}"),
        Standing.OPEN: ("error", f"{stood.result.verdict}: {found}"),
        Standing.NOT_APPLICABLE: ("skipped", found),
    }[stood.standing]


def _evidence(stood: Stood, again: str) -> str:
    result = stood.result
    told = lines(result.timeline)
    left = len(told) - TIMELINE_LINES
    return "\n".join([
        result.title, result.found, *([result.note] if result.note else []),
        *(f"breach of {b.rule}: {b.what}" for b in result.breaches), f"again: {again}", "",
        *([f"({left} earlier lines are in the results)"] if left > 0 else []), *told[-TIMELINE_LINES:],
    ])  # fmt: skip


def _others(decision: Decision) -> Iterable[ET.Element]:
    """Yield what fails a run and is no result's."""
    for name in decision.missing:
        yield _with(_named(name.partition(".")[0], name), "error", "not run", "it was announced, and has no result")
    for entry in decision.unmatched:
        problem = f"no case answers to this expectation ({entry.reason}): correct or remove it"
        yield _with(_named("expectations", entry.case), "failure", "unmatched", problem)
    if not decision.run.complete:
        yield _with(_named("results", "complete"), "error", "cut", "the results have no footer: the run was cut short")
    elif decision.exit is Exit.INCONCLUSIVE and not decision.missing and not decision.standing(Standing.OPEN):
        yield _with(_named("results", "judged"), "error", "nothing judged", "no case came to a verdict that decides")


def _named(rule: str, name: str, seconds: float = 0.0) -> ET.Element:
    return ET.Element("testcase", classname=_text(rule), name=_text(name), time=f"{seconds:.3f}")


def _with(case: ET.Element, outcome: str, kind: str, message: str) -> ET.Element:
    ET.SubElement(case, outcome, type=kind, message=_text(message))
    return case


def _text(value: str) -> str:
    """Return text that XML can hold: other characters are spelt out."""
    return _NO_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", value)
