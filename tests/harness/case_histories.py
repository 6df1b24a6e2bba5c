"""Clean histories of black-box cases, made up in the real format, that a test may break in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from harness.cases.case import CaseInfo
from harness.cases.judging import judge
from harness.cases.metrics import EXPIRED, FAILED_TRANSFERS, USAGE
from harness.cases.registry import CASES
from harness.cases.steps import Call, Line, Look, Mark, Step, StepLog
from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.verdicts import CheckResult
from reference_impl.rules.events import Scalar
from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord

S = 1_000_000_000
ORIGIN = 1000 * S
HELD = 0.3
"""What requests of a case hold, as a share of a pool: far more than what counts as nothing."""
HAND_OFF: dict[str, Any] = {
    "do_remote_prefill": True, "remote_engine_id": "p-life-1", "remote_request_id": "r", "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 2000,
}  # fmt: skip
COUNTERS = {
    EXPIRED: 0.0, FAILED_TRANSFERS: 0.0, "vllm:nixl_num_notifications_after_expiry_total": 0.0,
    "vllm:nixl_num_failed_notifications_total": 0.0, "vllm:nixl_bytes_transferred_count": 0.0,
    "pdproof:leases_live": 0.0, "pdproof:leases_extended_total": 0.0, "pdproof:leases_released_total": 0.0,
}  # fmt: skip


def at(seconds: float) -> int:
    return ORIGIN + round(seconds * S)


class CaseHistory:
    """What a drive of `name` wrote down. Servers are p0 and d0; the case begins at second 0."""

    def __init__(self, name: str) -> None:
        self.case = CASES[name]
        self.steps: list[Step] = []
        self.metrics: list[tuple[float, str, str, float]] = []
        self.wrong: set[str] = set()
        self.hindered = ""
        self._count = 0
        for worker in ("p0", "d0"):
            self.look("baseline", worker, 0, 0.0)

    def look(self, name: str, worker: str, seconds: float, usage: float, **more: float) -> None:
        values = COUNTERS | {USAGE: usage} | more
        self.steps.append(Look(t_ns=at(seconds), name=name, worker=worker, poked=True, values=values))

    def mark(self, name: str, seconds: float, **detail: Scalar) -> None:
        self.steps.append(Mark(t_ns=at(seconds), name=name, detail=detail))

    def line(self, worker: str, seconds: float, text: str) -> None:
        self.steps.append(Line(t_ns=at(seconds), worker=worker, file=f"{worker}-e1.log", text=text))

    def sampled(self, worker: str, seconds: float, usage: float) -> None:
        self.metrics.append((seconds, worker, USAGE, usage))

    def call(
        self, label: str, leg: str, seconds: float, took: float = 0.5, *, tokens: int = 64, first: float = 0.1,
        returned: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self._count += 1
        tokens = 1 if leg == "prefill" else tokens
        handed = returned if returned is not None else HAND_OFF if leg == "prefill" else None
        fields: dict[str, Any] = {
            "request_id": f"{label}-{self._count}-{leg}", "label": label, "worker": "p0" if leg == "prefill" else "d0",
            "leg": leg, "sent_ns": at(seconds), "first_ns": at(seconds + first), "end_ns": at(seconds + took),
            "input_tokens": 2000, "max_tokens": tokens, "output_tokens": tokens, "status": 200, "outcome": "ok",
            "returned": handed,
        }  # fmt: skip
        self.steps.append(Call(**fields | more))

    def request(self, label: str, seconds: float, took: float = 0.5) -> None:
        """Both legs."""
        self.call(label, "prefill", seconds, 0.1)
        self.call(label, "decode", seconds + 0.1, took)

    def finale(self, seconds: float, *, p: dict[str, float] | None = None, d: dict[str, float] | None = None) -> None:
        """What the runner does behind every drive; counters of both servers at the very end."""
        for worker in ("p0", "d0"):
            self.look("end", worker, seconds, 0.0)
        self.request("after", seconds + 0.5)
        self.look("final", "p0", seconds + 2, 0.0, **(p or {}))
        self.look("final", "d0", seconds + 2, 0.0, **(d or {}))
        self.mark("machine", seconds + 3, late_ms=5.0, rate_per_s=140.0)

    # -- breaking it ---------------------------------------------------------------------------------------------

    def change_calls(self, label: str, leg: str = "", **fields: Any) -> None:
        """Change calls; there must be some."""
        self._change(lambda s: isinstance(s, Call) and s.label.startswith(label) and leg in ("", s.leg), **fields)

    def fails(self, label: str, leg: str = "", status: int = 500, error: str = "HTTP 500: no") -> None:
        """Have calls end in an error."""
        self.change_calls(label, leg, outcome="fail", status=status, error=error, output_tokens=0, first_ns=0)

    def answers_wrongly(self, label: str) -> None:
        """Have the answers of the decode side be others."""
        found = {
            s.request_id for s in self.steps if isinstance(s, Call) and s.label.startswith(label) and s.leg == "decode"
        }
        assert found
        self.wrong |= found

    def change_looks(self, name: str, worker: str, **values: float) -> None:
        """Change what a server showed; `usage` for short."""
        if "usage" in values:
            values[USAGE] = values.pop("usage")
        chosen = [s for s in self.steps if isinstance(s, Look) and (s.name, s.worker) == (name, worker)]
        assert chosen, "the mutation must change something"
        self.steps = [
            msgspec.structs.replace(s, values=s.values | values) if s in chosen and isinstance(s, Look) else s
            for s in self.steps
        ]  # fmt: skip

    def drop_metric(self, name: str) -> None:
        """Have no server show a metric."""
        self.steps = [
            msgspec.structs.replace(s, values={k: v for k, v in s.values.items() if k != name})
            if isinstance(s, Look) else s
            for s in self.steps
        ]  # fmt: skip

    def move(self, matches: Callable[[Step], bool], seconds: float) -> None:
        """Have looks, marks and lines happen later."""
        self._change(matches, shift_s=seconds)

    def drop(self, matches: Callable[[Step], bool]) -> None:
        """Take steps away; there must be some."""
        kept = [s for s in self.steps if not matches(s)]
        assert len(kept) < len(self.steps), "the mutation must change something"
        self.steps = kept

    def _change(self, matches: Callable[[Step], bool], shift_s: float = 0.0, **fields: Any) -> None:
        assert any(matches(s) for s in self.steps), "the mutation must change something"
        changed: list[Step] = []
        for step in self.steps:
            if matches(step):
                moved = {} if isinstance(step, Call) or not shift_s else {"t_ns": step.t_ns + round(shift_s * S)}
                changed.append(msgspec.structs.replace(step, **fields, **moved))
            else:
                changed.append(step)
        self.steps = changed

    # -- writing and judging it ----------------------------------------------------------------------------------

    def write(self, folder: Path) -> RunFolder:
        info = CaseInfo(name=self.case.name, twin="", size="small", terms=self.case.terms, prefill="p0", decode="d0")
        manifest = Manifest(
            run_id=folder.name, scenario=self.case.name, arm="", title=self.case.title, profile="made-up",
            time_scale=1.0, seed=1, started_wall_ns=0, command=[], versions={}, commit="", machine={},
            configuration={"case": msgspec.to_builtins(info), "target": "made-up"},
        )  # fmt: skip
        writer = RunWriter(folder, manifest)
        log = StepLog(folder)
        for step in sorted(self.steps, key=_moment):
            log.add(step)
        log.close(self.hindered)
        for seconds, worker, name, value in self.metrics:
            writer.metric(at(seconds), worker, name, value)
        calls = [s for s in self.steps if isinstance(s, Call)]
        return writer.finish((_row(c), "", self._content(c)) for c in calls)

    def judged(self, folder: Path) -> dict[str, CheckResult]:
        """Return the verdicts by check."""
        return {r.check: r for r in judge(self.write(folder))}

    def _content(self, call: Call) -> bool | None:
        return call.request_id not in self.wrong if call.output_tokens else None


def _moment(step: Step) -> int:
    return step.end_ns if isinstance(step, Call) else step.t_ns


def _row(call: Call) -> RequestRecord:
    return RequestRecord(
        request_id=call.request_id, prompt=PromptSpec(seed=1, index=1, input_tokens=call.input_tokens),
        max_tokens=call.max_tokens, intended_ns=call.sent_ns, sent_ns=call.sent_ns, send_began_ns=call.sent_ns,
        end_ns=call.end_ns, chunks=[Chunk(call.first_ns, call.output_tokens)] if call.output_tokens else [],
        output_ids=list(range(call.output_tokens)), outcome=Outcome(call.outcome), http_status=call.status,
    )  # fmt: skip
