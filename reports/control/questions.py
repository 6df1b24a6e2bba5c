"""The 14 questions of the RPC document's checklist, each with what this run measured and the cases that prove it.

An answer is `shown` by figures of this run, `broken` by them, or `not shown`: what was not measured is never a tick.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from harness.operation_history import Counts
from harness.run_folder import RunFolder
from reference_impl.rules.blockgroups import Answer, Refusal
from reports import words
from reports.control.gauges import CLIENTS, Breaker, Gauge
from reports.control.methods import Method, Users
from reports.control.migrations import Moves
from reports.control.rpc_lines import RpcLog
from reports.control.setup import ClientPolicy
from reports.control.storms import WITH, WITHOUT, Storm


class Status(enum.StrEnum):
    """How far this run answers a question."""

    SHOWN = "shown"
    BROKEN = "broken"
    NOT_SHOWN = "not shown"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers are made of."""

    run: RunFolder
    counts: Counts
    breaches: dict[str, int]
    """By rule."""
    methods: dict[str, Method]
    users: Users
    moves: Moves
    storms: dict[str, Storm]
    gauges: dict[str, Gauge]
    breaker: Breaker
    log: RpcLog
    policy: ClientPolicy | None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer. `tests` are `file::name` below `tests/`."""

    question: str
    status: Status
    answer: str
    rules: list[str]
    checks: list[str]
    """Checks of this run that stand for one of the rules, with their verdicts."""
    tests: list[str]


Said: TypeAlias = tuple[bool | None, str]
"""Whether the run shows it (None: it does not tell), and the answer."""


class _Question(msgspec.Struct, frozen=True):
    text: str
    say: Callable[[Facts], Said]
    rules: list[str]
    tests: list[str]


def checklist(facts: Facts) -> dict[str, Asked]:
    """Return the questions in the document's order, by "q1" to "q14"."""
    return {f"q{number}": _asked(question, facts) for number, question in enumerate(QUESTIONS, 1)}


def _asked(question: _Question, facts: Facts) -> Asked:
    shown, answer = question.say(facts)
    broken = sum(facts.breaches.get(rule, 0) for rule in question.rules)
    if broken:
        shown, answer = False, f"{words.plural(broken, 'breach', 'breaches')} of its rules. {answer}"
    status = {True: Status.SHOWN, False: Status.BROKEN, None: Status.NOT_SHOWN}[shown]
    checks = [f"{c.title}: {c.verdict}" for c in facts.run.verdicts if set(c.rules) & set(question.rules)]
    return Asked(
        question=question.text, status=status, answer=answer, rules=question.rules, checks=checks,
        tests=question.tests,
    )  # fmt: skip


def _critical_path(facts: Facts) -> Said:
    u = facts.users
    if not u.during:
        return None, "No user's request was under way while a block service was away."
    beside = "" if u.ttft_before_ms.p50 is None else f"; before the first fault it was {_ms(u.ttft_before_ms.p50)}"
    p50 = "more than any measured" if u.ttft_during_ms.p50 is None else _ms(u.ttft_during_ms.p50)
    text = (
        f"No. {words.plural(u.during, 'request')} of users were under way while a block service was away: "
        f"{u.during_failed:,} failed, {u.during_wrong:,} had wrong tokens. Their TTFT p50 was {p50}{beside}."
    )
    return not (u.during_failed or u.during_wrong), text


def _has_timeout(facts: Facts) -> Said:
    log = facts.log
    if not log.lines:
        return None, "The services wrote no log."
    text = f"{words.share(log.timed, log.lines)} calls in the services' logs came with a deadline"
    if log.timeout_ms_min is not None:
        text += f"; on arrival {log.timeout_ms_min:,} to {log.timeout_ms_max:,} ms were left"
    if log.served_untimed:
        return False, f"{text}. {log.served_untimed:,} without one were served."
    return True, f"{text}. None without one was served."


def _below_upstream(facts: Facts) -> Said:
    log, policy = facts.log, facts.policy
    if log.matched:
        text = (
            f"{log.matched:,} attempts stand beside the line of their call in the clients' log; {log.over_upstream:,} "
        )
        return not log.over_upstream, text + "had more time left than their call had in all."
    if policy is None or policy.call_timeout_s is None or log.write_timeout_ms_max is None:
        return None, "This run holds no line of a caller's own to compare the services' with."
    limit_ms = policy.call_timeout_s * 1e3
    text = (
        f"The write with most time left had {log.write_timeout_ms_max:,} ms, of calls with {limit_ms:,.0f} ms in all."
    )
    return log.write_timeout_ms_max <= limit_ms, text


def _retries(facts: Facts) -> Said:
    again = [i for i in facts.run.control.invocations if i.attempts > 1]
    if not again:
        return None, f"None of {facts.counts.invocations:,} calls needed a second attempt."
    ends = Counter(i.outcome for i in again)
    text = (
        f"Yes. {words.share(len(again), facts.counts.invocations)} calls took more than one attempt; then "
        f"{ends['ok']:,} were applied, {ends['fail']:,} refused or failed, {ends['unknown']:,} stayed unknown."
    )
    return True, text


def _bounded_retries(facts: Facts) -> Said:
    every, policy = facts.methods["all"], facts.policy
    limit = policy.attempts_max if policy else None
    over = limit is not None and every.attempts_max > limit
    parts = [
        f"At most {words.plural(every.attempts_max, 'attempt')} a call" + (f", of {limit} allowed" if limit else "")
    ]
    short = _too_soon(facts)
    if short is not None:
        parts.append(f"{short:,} calls took less time than the pauses before their attempts, at their shortest")
    with_, without = facts.storms.get(WITH), facts.storms.get(WITHOUT)
    if with_ and without:
        parts.append(
            f"in the storm's outage the budget held them to {with_.outage_amplification:.2f} attempts a call, without "
            f"it there were {without.outage_amplification:.2f}"
        )
    text = "; ".join(parts) + ". Jitter is shown by its test: rows do not tell of it."
    if over or short:
        return False, text
    known = (limit is not None and every.attempts_max > 1) or (with_ is not None and without is not None)
    return (True if known else None), text


def _too_soon(facts: Facts) -> int | None:
    """Count the calls that were over sooner than their pauses take at their shortest; None: the policy is not told."""
    p = facts.policy
    if p is None or p.initial_s is None or p.multiplier is None or p.max_s is None or p.jitter is None:
        return None
    short = 0
    for i in facts.run.control.invocations:
        pauses = [min(p.initial_s * p.multiplier**n, p.max_s) * (1 - p.jitter) for n in range(i.attempts - 1)]
        short += i.latency_ms < sum(pauses) * 1e3
    return short


def _idempotent(facts: Facts) -> Said:
    c = facts.counts
    if not c.retried or not c.effects:
        return None, "Nothing was asked for twice."
    text = (
        f"{c.retried:,} calls were retried, or asked again for what had been asked before; {c.replayed:,} got the "
        f"answer that had been given before. {c.effects:,} effects, {c.double_effects:,} of them a second one."
    )
    return (None if not c.replayed and not c.double_effects else not c.double_effects), text


def _epochs(facts: Facts) -> Said:
    rows = facts.run.control.invocations
    stale = [i for i in rows if i.refusal == Refusal.STALE_EPOCH]
    future = sum(i.refusal == Refusal.FUTURE_EPOCH for i in rows)
    text = f"All {len(rows):,} writes named one. {len(stale):,} were refused as stale, {future:,} as not begun"
    if not stale:
        return None, f"{text}."
    told = sum(bool(i.answer) and msgspec.json.decode(i.answer, type=Answer).epoch > i.epoch for i in stale)
    return told == len(stale), f"{text}; {told:,} of the stale ones were told the current epoch."


def _long_operations(facts: Facts) -> Said:
    m = facts.moves
    if not m.started:
        return None, "No group was moved."
    ended = ", ".join(f"{n:,} {status}" for status, n in sorted(m.by_status.items()))
    text = f"{words.plural(m.started, 'migration')}, each named by the operation that started it: {ended}. "
    text += f"{m.starts_repeated:,} further attempts to start them started none. "
    return not m.owner_breaches, text + f"{m.owner_breaches:,} groups without exactly one owner at the end."


def _pins(facts: Facts) -> Said:
    rows = [i for i in facts.run.control.invocations if i.method in ("pin", "unpin")]
    again = sum(i.attempts > 1 or i.replayed for i in rows)
    late = sum(i.refusal == Refusal.UNPINNED_BEFORE for i in rows)
    left = sum(len(msgspec.json.decode(row.pins, type=list[str])) for row in facts.run.control.groups)
    text = (
        f"Of {len(rows):,} pins and unpins {again:,} came more than once; {late:,} pins came after their unpin and "
        f"were refused. {left:,} pins stand at the end."
    )
    return (True if again else None), text


def _data_plane(facts: Facts) -> Said:
    answers = [len(i.answer) for i in facts.run.control.invocations if i.answer]
    lent = [i for i in facts.run.control.invocations if i.method == "prepare_get" and i.outcome == "ok" and i.answer]
    places = [p for i in lent if (p := msgspec.json.decode(i.answer, type=Answer).place) is not None]
    if not places and not facts.moves.bytes_moved:
        return None, "No group was lent or moved, so no bulk data was on its way."
    text = (
        f"Yes. {words.size(facts.moves.bytes_moved)} were moved and {len(places):,} loans of "
        f"{words.size(sum(p.size_bytes for p in places))} granted; the largest of {len(answers):,} answers has "
        f"{max(answers, default=0):,} bytes."
    )
    largest = max([p.size_bytes for p in places], default=None)
    return (None if largest == 0 else True), text


def _rate_limits(facts: Facts) -> Said:
    gauge = facts.gauges["rate_limited_count"]
    if not gauge.samples:
        return None, "The buckets' counters were not scraped."
    limited = sum(gauge.of.values())
    text = f"{limited:,.0f} takes found a bucket empty and were delayed or refused"
    return (True if limited else None), text + ("." if limited else ": nothing ran against a limit in this run.")


def _breaks(facts: Facts) -> Said:
    b = facts.breaker
    fast = sum(i.error_code == "CIRCUIT_OPEN" for i in facts.run.control.invocations)
    if not b.samples and not fast:
        return None, "The clients' breakers were not scraped."
    text = (
        f"Of {b.samples:,} samples of the clients' breakers {b.open:,} saw one OPEN and {b.half_open:,} HALF_OPEN; "
        f"{fast:,} calls failed at once because of it."
    )
    if not (b.open or b.half_open or fast):
        return None, f"{text} None had to open."
    return True, f"{text} At the end {'all were CLOSED' if b.last == 0 else 'not all were CLOSED'}."


def _pool(facts: Facts) -> Said:
    used = facts.gauges["connection_pool_in_use"].of.get(CLIENTS)
    waited = facts.gauges["connection_pool_wait_time"].of.get(CLIENTS)
    if used is None or waited is None:
        return None, "The clients' pools were not scraped."
    text = f"At most {used:,.0f} places were in use at once; attempts waited {words.milliseconds(waited)} for one"
    return True, f"{text}, added up over the run for the client that waited longest."


def _logs(facts: Facts) -> Said:
    log = facts.log
    if not log.writes:
        return None, "The services' logs hold no write."
    text = (
        f"{words.share(log.named, log.writes)} lines of writes name request, operation, block group and epoch; "
        f"{words.share(log.whole, log.lines)} lines have all eleven fields of the document."
    )
    return log.named == log.writes and log.whole == log.lines, text


def _ms(value: float) -> str:
    return words.milliseconds(value)


QUESTIONS: Final = (
    _Question(
        "Is this remote call on the critical path of an online request?", _critical_path, ["KVC-IDEM-014"],
        ["blockservice/test_breaker.py::test_callers_fall_back_to_computing_anew"],
    ),
    _Question(
        "Does it have a timeout?", _has_timeout, ["KVC-IDEM-012"],
        ["blockservice/test_server_bad_input.py::test_a_call_without_a_deadline_is_refused_on_every_method"],
    ),
    _Question(
        "Is the timeout less than what is left upstream?", _below_upstream, ["KVC-IDEM-012"],
        ["blockservice/test_client_deadlines.py::test_a_call_below_a_call_inherits_what_is_left",
         "blockservice/test_server.py::test_a_handler_has_what_its_caller_has_left_and_no_more"],
    ),
    _Question(
        "Is a failure retried?", _retries, ["KVC-IDEM-013"],
        ["blockservice/test_client.py::test_only_errors_that_may_pass_are_tried_again"],
    ),
    _Question(
        "Do retries have a maximum, back-off and jitter?", _bounded_retries, ["KVC-IDEM-013"],
        ["blockservice/test_client.py::test_a_call_is_tried_at_most_so_often",
         "blockservice/test_client.py::test_pauses_double_and_are_jittered",
         "blockservice/test_retry_storm.py::test_a_budget_keeps_a_storm_from_outlasting_its_outage"],
    ),
    _Question(
        "Is what is retried idempotent?", _idempotent,
        ["KVC-IDEM-001", "KVC-IDEM-002", "KVC-IDEM-003", "KVC-IDEM-006", "KVC-IDEM-007"],
        ["blockservice/test_six_scenarios.py::test_safe_a_restart_and_the_same_id_replay_the_saved_result",
         "blockservice/test_failpoints.py::test_a_crash_anywhere_and_a_retry_at_the_successor_have_one_effect"],
    ),
    _Question(
        "Do writes carry an epoch?", _epochs, ["KVC-IDEM-005"],
        ["blockservice/test_six_scenarios.py::test_safe_a_new_id_with_a_stale_epoch_is_refused"],
    ),
    _Question(
        "Do long operations have an operation id?", _long_operations, ["KVC-IDEM-011"],
        ["rules/test_blockgroups.py::test_a_migration_starts_pending_under_its_operations_id",
         "blockservice/test_server.py::test_a_migration_is_told_of_by_the_operation_that_started_it"],
    ),
    _Question(
        "Are pin and unpin idempotent by request id?", _pins, ["KVC-IDEM-009"],
        ["rules/test_blockgroups.py::test_a_pin_counts_once_however_often_it_comes",
         "rules/test_blockgroups.py::test_a_pin_after_its_unpin_is_refused"],
    ),
    _Question(
        "Is bulk KV kept apart from control RPCs?", _data_plane, ["KVC-IDEM-016"],
        ["blockservice/test_wire.py::test_no_message_has_room_for_kv_but_only_for_digests_of_sixteen_bytes"],
    ),
    _Question(
        "Is what lies downstream protected by rate limits?", _rate_limits, ["KVC-IDEM-015"],
        ["blockservice/test_buckets.py::test_online_reads_keep_their_share_while_migrations_flood_their_bucket"],
    ),
    _Question(
        "Does a breaker open when it fails again and again?", _breaks, ["KVC-IDEM-014"],
        ["blockservice/test_breaker.py::test_it_opens_probes_and_closes"],
    ),
    _Question(
        "Can the connection pool become the bottleneck?", _pool, ["KVC-IDEM-017", "KVC-IDEM-018"],
        ["blockservice/test_pool.py::test_a_pool_that_is_too_small_shows_as_waiting_while_the_server_is_idle",
         "blockservice/test_pool.py::test_a_slow_call_does_not_delay_the_others_on_its_connection"],
    ),
    _Question(
        "Do logs name request_id, operation_id, block_group_id and epoch?", _logs, ["KVC-IDEM-018"],
        ["blockservice/test_server_metrics.py::test_every_call_has_a_line_with_the_documents_fields"],
    ),
)  # fmt: skip
