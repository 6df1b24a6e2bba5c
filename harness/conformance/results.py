"""What a conformance run leaves behind: one line a case, with a header before and a footer behind them."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from harness.conformance.case import Level, Source
from harness.conformance.timeline import Entry
from harness.conformance.watch import Breach
from harness.verdicts import Verdict

FORMAT = "pdproof-conformance-1"


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What was run."""

    format: str = FORMAT
    subject: str
    versions: dict[str, str]
    capabilities: list[str]
    """What the subject claims."""
    configuration: dict[str, Any]
    """How the subject was named: `connector` or `kv_transfer_config`."""
    seed: int
    cases: list[str]
    """Those that were chosen, in order."""
    twins: bool = False
    """Whether the cases' broken twins were run, on the reference implementation, in place of the cases."""
    commit: str
    machine: dict[str, str | int | float | bool | None]
    started_wall_ns: int
    command: list[str]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, tag="case"):
    """What came of one case, or of one of its twins."""

    case: str
    rule: str
    title: str
    level: Level
    source: Source
    twin: str = ""
    verdict: Verdict | None
    """None: the rule does not apply; `found` says why. Of a twin: pass if it was caught."""
    found: str
    note: str = ""
    breaches: list[Breach] = []
    timeline: list[Entry] = []
    needs: list[str] = []
    """Capabilities that it used, and so exercised."""
    seconds: float
    """Real ones."""


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag="footer"):
    """The end. A stream without one was cut."""

    results: int
    ended_wall_ns: int


Line: TypeAlias = Header | CaseResult | Footer
