"""What a run folder shows of a case: calls, looks, log lines, moments. Pure: it opens the folder and nothing else."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from harness.cases.case import CaseInfo
from harness.cases.metrics import USAGE
from harness.cases.steps import Call, Line, Look, Mark, Step, read_steps
from harness.cases.terms import SIZES, PairTerms, Size, spare_share
from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import Scalar
from workloads.rows import Outcome

S = TypeVar("S", Mark, Call, Look, Line)
REQUIRED_FIELDS: Final = (
    "do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port",
    "tp_size",
)  # fmt: skip
"""What a hand-off must hold so that another engine can come for the blocks."""
STEP_S: Final = 1.5
"""What a server may take on a busy machine to act on what it knows, and a look to find out."""
KV_LINE: Final = r"Releasing expired KV blocks for request|Declining expired remote read"


class Came(enum.StrEnum):
    """What came of a call."""

    RIGHT = "the right answer"
    UNCHECKED = "an answer"  # that nobody can hold against the right one, or one without tokens
    WRONG = "a wrong answer"
    BEGUN_WRONG = "the beginning of a wrong answer"
    ERROR = "an error"  # that the client was told
    NONE = "no answer"


class CaseRun:
    """A case's run folder, read."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    @functools.cached_property
    def info(self) -> CaseInfo:
        """What ran."""
        try:
            return msgspec.convert(self.run.manifest.configuration["case"], CaseInfo)
        except (KeyError, msgspec.ValidationError) as error:
            raise BadRunFolder(self.run.path, f"manifest.json: configuration.case: {error}") from error

    @property
    def terms(self) -> PairTerms:
        """The pair's terms, as the case declares them."""
        return self.info.terms

    @property
    def size(self) -> Size:
        """How large its requests were."""
        return SIZES[self.info.size]

    @property
    def p(self) -> str:
        """The prefill server's worker id."""
        return self.info.prefill

    @property
    def d(self) -> str:
        """The decode server's worker id."""
        return self.info.decode

    @functools.cached_property
    def _read(self) -> tuple[list[Step], str]:
        steps, end = read_steps(self.run.path)
        return steps, end.hindered

    @property
    def hindered(self) -> str:
        """Why the drive could not do what it was to do; "": it could."""
        return self._read[1]

    def _of(self, kind: type[S]) -> Iterator[S]:
        return (step for step in self._read[0] if isinstance(step, kind))

    def calls(self, label: str = "", leg: str = "") -> list[Call]:
        """Return the calls whose label begins so, in the order of their ends. Pokes only if they are asked for."""
        legs = {leg} if leg else {"prefill", "decode", "plain"}
        return [c for c in self._of(Call) if c.leg in legs and c.label.startswith(label)]

    def call(self, label: str, leg: str = "decode") -> Call:
        """Return the one call of this label and leg. Raises LookupError."""
        found = [c for c in self.calls(label, leg) if c.label == label]
        if len(found) != 1:
            raise LookupError(f"{len(found)} calls {label!r} ({leg}) where there should be one")
        return found[0]

    def all_marks(self) -> list[Mark]:
        """Return every mark, in order."""
        return list(self._of(Mark))

    def marks(self, name: str) -> list[Mark]:
        """Return the marks of this name, in order."""
        return [m for m in self._of(Mark) if m.name == name]

    def moment(self, name: str) -> int:
        """Return the first moment of this name. Raises LookupError."""
        marks = self.marks(name)
        if not marks:
            raise LookupError(f"no moment {name!r}")
        return marks[0].t_ns

    def looks(self, name: str, worker: str) -> list[Look]:
        """Return the looks of this name at a server that it answered, in order."""
        return [k for k in self._of(Look) if (k.name, k.worker) == (name, worker) and k.values]

    def look(self, name: str, worker: str) -> Look:
        """Return the last of them. Raises LookupError."""
        found = self.looks(name, worker)
        if not found:
            raise LookupError(f"no look {name!r} at {worker}")
        return found[-1]

    def lines(self, worker: str, pattern: str, since_ns: int = 0, until_ns: int = 2**63) -> list[Line]:
        """Return a server's log lines that match, in a span of time."""
        wanted = re.compile(pattern)
        return [
            line for line in self._of(Line)
            if line.worker == worker and since_ns <= line.t_ns <= until_ns and wanted.search(line.text)
        ]  # fmt: skip

    def usage(self, look: str, worker: str) -> float:
        """Return the share of a server's blocks that are in use, at the last look of this name."""
        return self.look(look, worker).values[USAGE]

    def grown(self, worker: str, *counters: str, since: str = "baseline", until: str = "final") -> float | None:
        """Return by how much a counter (the first of these that there is) grew between two looks; None: unknown."""
        before, after = self.look(since, worker).values, self.look(until, worker).values
        for name in counters:
            if name in after:
                grown = after[name] - before.get(name, 0.0)
                return after[name] if grown < 0 else grown  # another life of the server counts from zero
        return None

    @property
    def spare(self) -> float:
        """The share of a pool that counts as nothing."""
        return spare_share(self.terms.pool, self.size)

    def freed_ns(self, name: str, worker: str) -> int | None:
        """Return when a server was first seen with its blocks as free as before, by looks `name`; None: never."""
        limit = self.usage("baseline", worker) + self.spare
        return next((k.t_ns for k in self.looks(name, worker) if k.values.get(USAGE, 1.0) <= limit), None)

    def holds(self, look: str, worker: str) -> bool:
        """Whether a server holds more blocks at a look than when the case began."""
        return self.usage(look, worker) > self.usage("baseline", worker) + self.spare

    def sampled(self, worker: str, name: str) -> list[tuple[int, float]]:
        """Return what the sampler saw of a metric, in order."""
        rows = self.run.metrics
        rows = rows[(rows.node == worker) & (rows.name == name)].sort_values("t_ns")
        return [(int(t), float(v)) for t, v in zip(rows.t_ns, rows.value, strict=True)]

    @functools.cached_property
    def content(self) -> dict[str, bool | None]:
        """Whether each answer was the right one, by request id; None: it had no tokens, or nobody knows."""
        rows = self.run.requests
        return {
            str(name): None if ok is None or ok is _NA else bool(ok)
            for name, ok in zip(rows.request_id, rows.content_ok.astype(object), strict=True)
        }

    def came(self, call: Call) -> Came:
        """Return what came of a call. A stream that began well and has no end within the limit is no answer."""
        right = self.content.get(call.request_id)
        if call.ok:
            return Came.WRONG if right is False else Came.RIGHT if right else Came.UNCHECKED
        if right is False:
            return Came.BEGUN_WRONG
        return Came.ERROR if call.status > 0 and call.outcome == Outcome.FAIL else Came.NONE

    def right(self, call: Call) -> bool:
        """Whether a call ended in a whole answer, and it is not known to be wrong."""
        return self.came(call) in (Came.RIGHT, Came.UNCHECKED)

    def refused(self, call: Call) -> bool:
        """Whether a call ended in an error that the client was told, and no token of it was wrong."""
        return self.came(call) is Came.ERROR

    def ended(self, call: Call) -> str:
        """Return in a few words how a call ended: what came of it, unless it was right, and after how long."""
        came = self.came(call)
        if call.ok:
            wrong = f"{came}, " if came is Came.WRONG else ""
            return f"{call.label}: {wrong}{counted(call.output_tokens, 'token')} after {call.seconds:.2f} s"
        return f"{call.label}: {came} ({call.error or call.outcome}) after {call.seconds:.2f} s"

    def as_policy_says(self, call: Call) -> bool:
        """Whether a request whose KV could not be loaded ended as the policy says (R2): recomputed, or an error."""
        return self.right(call) if self.terms.recomputes else self.refused(call)


def _missing() -> Any:
    import pandas as pd

    return pd.NA


_NA: Final = _missing()


def told(
    check: str, title: str, rules: list[str], problems: list[str], found: str, *, unknown: str = "",
    **evidence: Scalar,
) -> CheckResult:  # fmt: skip
    """Return a verdict: `fail` with the problems if there are any, `inconclusive` with `unknown` if that is set."""
    verdict = Verdict.FAIL if problems else Verdict.INCONCLUSIVE if unknown else Verdict.PASS
    parts = [*problems, *([unknown] if unknown and not problems else []), *(found.split("; ") if found else [])]
    text = "; ".join(dict.fromkeys(parts))  # what is a problem is often found as well: it is said once
    return CheckResult(check=check, title=title, rules=rules, verdict=verdict, found=text, evidence=evidence)
