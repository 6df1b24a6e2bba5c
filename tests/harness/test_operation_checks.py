"""The checks on the control plane accept a clean run, catch its broken twins, and pass nothing that was never tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from harness.checks import CHECKS, OF_CONTROL, judge, overall
from harness.errors import BadRunFolder
from harness.operation_history import WANTED
from harness.run_folder import CONTROL_TABLES, RunFolder, RunWriter
from harness.scenario import ControlSpec, Scenario
from harness.verdicts import Verdict
from reference_impl.rules.events import Event, EventKind, Scalar
from tests.harness.histories import clean
from tests.harness.kv_histories import KvHistory
from tests.harness.operation_histories import NODES, Flaw, history
from workloads.operation_rows import ControlRows, EffectRow, FinalRow, Invocation, Look, RecordRow, joined

SPEC = ControlSpec(applied_min=100, retried_min=20, replayed_min=5, crashes_min=1)
ROWS = history(1)


class ControlHistory(KvHistory):
    """A clean run with a control plane, whose rows may be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.control: ControlRows | None = joined([ROWS])
        self.spec = SPEC

    @property
    def rows(self) -> ControlRows:
        assert self.control is not None
        return self.control

    def write(self, path: Path) -> RunFolder:
        self.scenario = msgspec.structs.replace(self.scenario, control=self.spec)
        without = super().write(path.with_name(f"{path.name}-without"))
        writer = RunWriter(path, msgspec.structs.replace(without.manifest, run_id=path.name))
        for event in self.events:
            with writer.events_part(event.actor).open("ab") as part:
                part.write(msgspec.json.encode(event) + b"\n")
        for row in self.metrics:
            writer.metric(*row)
        return writer.finish(self.requests, self.control)


def test_a_clean_run_passes_every_check(tmp_path: Path) -> None:
    results = judge(ControlHistory().write(tmp_path / "run"))
    assert {r.check for r in results} >= OF_CONTROL
    assert [(r.check, r.found) for r in results if r.verdict is not Verdict.PASS] == []
    assert overall(results) is Verdict.PASS


def test_what_was_counted_is_said(tmp_path: Path) -> None:
    results = {r.check: r for r in judge(ControlHistory().write(tmp_path / "run"))}
    found, evidence = results["operations"].found, results["operations"].evidence
    for name in ("retried", "replayed", "refused", "effects"):
        assert f"{evidence[name]} {name}" in found
    assert "0 double effects" in found
    assert f"{evidence['unresolved']} of unknown outcome to the end" in found
    assert results["operations-load"].evidence["crashes"] == 1


@pytest.mark.parametrize("history_of", [clean, lambda path: KvHistory().write(path)])
def test_a_run_without_a_control_plane_is_not_asked_about_it(
    tmp_path: Path, history_of: Callable[[Path], RunFolder]
) -> None:  # fmt: skip
    run = history_of(tmp_path / "run")
    assert not {r.check for r in judge(run)} & OF_CONTROL
    assert run.control == ControlRows()
    assert not any((run.path / name).exists() for name in CONTROL_TABLES)


def double_effect(h: ControlHistory) -> None:
    effect = next(e for e in h.rows.effects if e.cause == "client")
    h.rows.effects.append(msgspec.structs.replace(effect, seq=len(h.rows.effects) + 1))


def lost_effect(h: ControlHistory) -> None:
    h.rows.effects.remove(next(e for e in h.rows.effects if e.kind == "transfer" and e.cause == "client"))


def no_effects_at_all(h: ControlHistory) -> None:
    h.rows.effects.clear()


def no_rows(h: ControlHistory) -> None:
    h.control = ControlRows()


def no_tables(h: ControlHistory) -> None:
    h.control = None


def few_applied(h: ControlHistory) -> None:
    h.spec = ControlSpec(applied_min=100_000, retried_min=0, replayed_min=0, crashes_min=0)


def few_retried(h: ControlHistory) -> None:
    h.spec = ControlSpec(applied_min=0, retried_min=100_000, replayed_min=0, crashes_min=0)


def few_replayed(h: ControlHistory) -> None:
    h.spec = ControlSpec(applied_min=0, retried_min=0, replayed_min=100_000, crashes_min=0)


def few_crashes(h: ControlHistory) -> None:
    h.spec = ControlSpec(applied_min=0, retried_min=0, replayed_min=0, crashes_min=2)


def unproved_crash(h: ControlHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.FAULT_PROVED)


def crash_that_ends_nothing(h: ControlHistory) -> None:
    h.events = [
        msgspec.structs.replace(e, detail=e.detail | {"fault": "fail_point", "action": "drop"})
        if e.kind is EventKind.FAULT_INJECTED else e
        for e in h.events
    ]  # fmt: skip


def two_owners(h: ControlHistory) -> None:
    owned = next(g for g in h.rows.groups if g.location == g.node and g.state == "RESIDENT")
    h.rows.groups.append(msgspec.structs.replace(owned, node="other", location="other"))


def lost_group(h: ControlHistory) -> None:
    moved = next(g for g in h.rows.groups if g.state == "MOVED")
    name = (moved.location, moved.tenant, moved.block_group_id)
    h.rows.groups.remove(next(g for g in h.rows.groups if (g.node, g.tenant, g.block_group_id) == name))


def still_moving(h: ControlHistory) -> None:
    h.rows.groups[0] = msgspec.structs.replace(h.rows.groups[0], state="MIGRATING_OUT")


def never(method: str) -> Callable[[ControlHistory], None]:
    """Return what leaves a history in which a method never had an effect."""

    def break_it(h: ControlHistory) -> None:
        asked = {(i.node, i.tenant, i.operation_id) for i in h.rows.invocations if i.method == method}
        h.rows.effects[:] = [e for e in h.rows.effects if (e.node, e.tenant, e.operation_id) not in asked]

    break_it.__name__ = f"no_{method}"
    return break_it


def no_migration_came_to_its_end(h: ControlHistory) -> None:
    h.rows.effects[:] = [e for e in h.rows.effects if "SUCCEEDED" not in e.after]


def moved_group_is_evicted_at_its_target(h: ControlHistory) -> None:
    settled = next(e for e in h.rows.effects if "MIGRATING_IN" in e.before and "RESIDENT" in e.after)
    lost = msgspec.structs.replace(settled, after=settled.after.replace("RESIDENT", "EVICTED"))
    h.rows.effects[h.rows.effects.index(settled)] = lost


def source_does_not_say_where(h: ControlHistory) -> None:
    left = next(e for e in h.rows.effects if "MIGRATING_OUT" in e.before and "MOVED" in e.after)
    evicted = msgspec.structs.replace(left, after=left.after.replace("MOVED", "EVICTED"))
    h.rows.effects[h.rows.effects.index(left)] = evicted


def pinned_group_is_recycled(h: ControlHistory) -> None:
    h.control = history(1, Flaw.HOLDS_NOTHING)


def looks_lie(h: ControlHistory) -> None:
    done = next(k for k in h.rows.looks if '"DONE"' in k.said)
    later = {"start_ns": done.end_ns + 1, "end_ns": done.end_ns + 2}
    h.rows.looks.append(msgspec.structs.replace(done, said='{"known":"UNKNOWN"}', **later))


FAIL, UNSURE = Verdict.FAIL, Verdict.INCONCLUSIVE
TWINS: list[tuple[str, Callable[[ControlHistory], None], Verdict]] = [
    ("operations", double_effect, FAIL),
    ("operations", lost_effect, FAIL),
    ("operations", no_effects_at_all, FAIL),
    ("operations", pinned_group_is_recycled, FAIL),
    ("operations", looks_lie, FAIL),
    ("operations", no_rows, UNSURE),
    ("operations", no_tables, UNSURE),
    ("operations-load", few_applied, UNSURE),
    ("operations-load", few_retried, UNSURE),
    ("operations-load", few_replayed, UNSURE),
    ("operations-load", few_crashes, UNSURE),
    ("operations-load", unproved_crash, UNSURE),
    ("operations-load", crash_that_ends_nothing, UNSURE),
    *(("operations-load", never(method), UNSURE) for method in WANTED),
    ("operations-load", no_migration_came_to_its_end, UNSURE),
    ("operations-load", no_rows, UNSURE),
    ("one-owner", two_owners, FAIL),
    ("one-owner", lost_group, FAIL),
    ("one-owner", still_moving, FAIL),
    ("one-owner", moved_group_is_evicted_at_its_target, FAIL),
    ("one-owner", source_does_not_say_where, FAIL),
    ("one-owner", no_tables, UNSURE),
]


@pytest.mark.parametrize(("check", "break_it", "verdict"), TWINS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_broken_twin_is_caught(
    tmp_path: Path, check: str, break_it: Callable[[ControlHistory], None], verdict: Verdict
) -> None:
    h = ControlHistory()
    break_it(h)
    run = h.write(tmp_path / "run")
    assert run.incomplete is None
    result = CHECKS[check](run)
    assert result.verdict is verdict, result.found
    assert result.found


@pytest.mark.parametrize("method", WANTED)
def test_what_never_had_an_effect_is_named(tmp_path: Path, method: str) -> None:
    h = ControlHistory()
    never(method)(h)
    result = CHECKS["operations-load"](h.write(tmp_path / "run"))
    assert f"never had an effect: {method}" in result.found
    assert str(result.evidence["never"]).startswith(method)


def linked(h: ControlHistory, t_ns: int, incarnation: str, *, new: bool) -> None:
    detail: dict[str, Scalar] = {"incarnation": incarnation, "new": new}
    h.events += [Event(t_ns, t_ns, f"{node}-blocks", EventKind.BLOCKS_LINKED, node, detail) for node in NODES]


@pytest.mark.parametrize("told", [True, False], ids=["its service tells", "its service ended before it told"])
def test_what_is_lost_with_an_engine_is_no_breach(tmp_path: Path, told: bool) -> None:
    h = ControlHistory()
    pinned_group_is_recycled(h)
    moments = [e.at_ns for e in h.rows.effects]
    linked(h, min(moments) - 1, "a", new=True)
    assert CHECKS["operations"](h.write(tmp_path / "one")).verdict is Verdict.FAIL
    linked(h, max(moments) + 1, "a", new=False)
    assert CHECKS["operations"](h.write(tmp_path / "the-same")).verdict is Verdict.FAIL
    linked(h, max(moments) + 2, "b", new=told)
    assert CHECKS["operations"](h.write(tmp_path / "another")).verdict is Verdict.PASS


def test_every_check_has_a_twin_that_it_must_catch() -> None:
    assert {check for check, _, _ in TWINS} == OF_CONTROL


def test_a_breach_is_told_so_that_it_can_be_found(tmp_path: Path) -> None:
    h = ControlHistory()
    double_effect(h)
    found = CHECKS["operations"](h.write(tmp_path / "run")).found
    operation_id = h.rows.effects[-1].operation_id
    assert "KVC-IDEM-001" in found
    assert f"operation {operation_id}" in found
    assert f"effect {h.rows.effects[-1].seq} " in found


# The folder.


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = ControlHistory().write(tmp_path / "run")
    assert RunFolder(run.path).control == ROWS


@pytest.mark.parametrize("name", CONTROL_TABLES)
def test_a_table_that_is_gone_or_short_makes_the_run_incomplete(tmp_path: Path, name: str) -> None:
    run = ControlHistory().write(tmp_path / "run")
    assert run.incomplete is None
    table = pd.read_parquet(run.path / name)
    table.iloc[:-1].to_parquet(run.path / name)
    assert "the footer promises" in str(RunFolder(run.path).incomplete)
    (run.path / name).unlink()
    assert "the footer promises" in str(RunFolder(run.path).incomplete)
    assert [r.check for r in judge(RunFolder(run.path))] == ["complete"]


@pytest.mark.parametrize(
    ("name", "column", "value", "words"),
    [
        ("effects.parquet", "seq", "soon", "another type"),
        ("operations.parquet", "client", None, "lacks values in client"),
        ("records.parquet", "answer", None, "lacks values in answer"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    tmp_path: Path, name: str, column: str, value: object, words: str
) -> None:  # fmt: skip
    run = ControlHistory().write(tmp_path / "run")
    table = pd.read_parquet(run.path / name).astype({column: "object"})
    table.loc[0, column] = value
    (table.astype({column: "string"})).to_parquet(run.path / name)
    with pytest.raises(BadRunFolder, match=words):
        _ = RunFolder(run.path).control


def test_a_row_that_is_not_json_is_an_error_of_the_check_and_the_rest_go_on(tmp_path: Path) -> None:
    h = ControlHistory()
    h.rows.effects[0] = msgspec.structs.replace(h.rows.effects[0], after="{")
    results = {r.check: r for r in judge(h.write(tmp_path / "run"))}
    assert results["operations"].verdict is Verdict.ERROR
    assert results["one-owner"].verdict is Verdict.PASS


def test_every_kind_of_row_has_a_table() -> None:
    assert list(CONTROL_TABLES.values()) == [Invocation, EffectRow, RecordRow, FinalRow, Look]


def test_a_folder_without_looks_is_read_as_one_of_before(tmp_path: Path) -> None:
    h = ControlHistory()
    h.rows.looks.clear()
    run = h.write(tmp_path / "run")
    (run.path / "looks.parquet").unlink()
    assert RunFolder(run.path).incomplete is None
    assert CHECKS["operations"](RunFolder(run.path)).verdict is Verdict.PASS


def test_a_control_plane_needs_groups_that_move() -> None:
    phases = [{"name": "baseline", "seconds": 1}, {"name": "drain", "seconds": 1}]
    scenario = {"name": "x", "title": "X", "phases": phases, "control": {}}
    with pytest.raises(ValueError, match="control needs"):
        msgspec.convert(scenario, Scenario)
    assert msgspec.convert(scenario | {"kv": {}}, Scenario).control == ControlSpec()
