"""Whatever a stranger's connector does is a verdict of that case, in words that say what; the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.conformance.exits import Exit
from harness.conformance.known import decided
from harness.conformance.naming import BadSubject, SubjectName
from harness.conformance.process import SubjectProcess
from harness.conformance.registry import CASES
from harness.conformance.run import Plan, run
from harness.conformance.simple_connector import Progress
from harness.conformance.stream import ConformanceRun
from harness.conformance.subject import Ending, How, Refused
from harness.verdicts import Verdict
from tests.conformance.steps import STEPS, judged, step, subject
from tests.repository.test_docs import BIN
from tests.waiting import until

GOOD, LATER = "KVC-REL-001.read", "KVC-LEASE-001.grant"
USES = {
    "new_request": GOOD, "scheduled": GOOD, "request_finished": GOOD, "aborted": "KVC-REL-002.queue", "message": GOOD,
    "question": "KVC-HSK-002.nonsense", "step": GOOD, "metrics": "KVC-XFER-002.recompute",
}  # fmt: skip
"""A case that comes to each hook."""


class Strange:
    """Nothing can be done with it, not even shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def spoilt(hook: str, does: Callable[..., Any]) -> Any:
    return type("Spoilt", (step(4).Connector,), {hook: does})


def raising(error: BaseException) -> Callable[..., Any]:
    def does(*_: Any) -> Any:
        raise error

    return does


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_what_is_spoilt_here_was_good() -> None:
    made = subject(step(4).Connector)
    assert {case for case in USES.values() if judged(case, made).verdict is not Verdict.PASS} == set()


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), AssertionError(), RecursionError(), Unspeakable(), Refused("no"), OSError("\udc80")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("hook", USES)
def test_a_hook_that_raises_ends_its_engine(hook: str, error: Exception) -> None:
    found = judged(USES[hook], subject(spoilt(hook, raising(error))))
    if isinstance(error, Refused) and hook == "new_request":
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "refused at the door: no" in found.note or "refused at the door: no" in found.found
        return
    assert found.verdict is Verdict.FAIL
    assert f"ended: {type(error).__name__}" in found.found
    assert "does (test_bad_subjects.py" in found.found
    found.found.encode()  # it can be written down


NONSENSE = [
    ("scheduled", None, "must return a number of tokens, got NoneType None"),
    ("scheduled", True, "must return a number of tokens, got bool True"),
    ("scheduled", -16, "wants to load -16 tokens"),
    ("scheduled", 10_000, "wants to load 10000 tokens of r1, which lacks 200"),
    ("scheduled", 7, "must load whole blocks of 16 tokens or the whole rest, got 7"),
    ("request_finished", None, "must return (keep the blocks, hand-off), got NoneType"),
    ("request_finished", (1, {}), "must return a bool, and a hand-off or None"),
    ("request_finished", (True, "x"), "must return a bool, and a hand-off or None"),
    ("request_finished", (True, {"a": {1, 2}}), "ended() returns an Ending that is none"),
    ("request_finished", (True, {"a": b"bytes"}), "ended() returns an Ending that is none"),
    ("request_finished", (True, {"a": Strange()}), "ended() returns an Ending that is none"),
    ("request_finished", (True, {"a": "\ud800"}), "ended() returns an Ending that is none"),
    ("question", "text", "answer() must return bytes or None, got str"),
    ("step", None, "step() must return a Progress, got NoneType None"),
    ("step", Strange(), "step() must return a Progress, got Strange ?"),
    ("step", Progress(released=["nobody"]), "step() releases nobody, of which nothing is kept"),
    ("step", Progress(loaded=["nobody"]), "says that nobody is loaded, which does not load"),
    ("step", Progress(failed={"nobody": "x"}), "says that nobody is failed, which does not load"),
    ("step", Progress(declined={"nobody": "x"}), "says that nobody is declined, which does not load"),
    ("step", Progress(abandoned={"nobody": "x"}), "says that nobody is abandoned, which does not load"),
    ("step", Progress(released=[7]), "step() returns a Progress that is none"),  # type: ignore[list-item]
    ("step", Progress(failed=["r1"]), "step() returns a Progress that is none"),  # type: ignore[arg-type]
    ("metrics", None, "metrics() must return numbers by names, got NoneType"),
    ("metrics", {"expired": "many"}, "metrics() must return numbers by names, got str 'expired': str 'many'"),
    ("metrics", {"expired": float("nan")}, "metrics() must return numbers by names"),
    ("metrics", {"nonsense": 1.0}, "metrics() has names that there are not"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "returns", "said"), NONSENSE, ids=[f"{each[0]}-{number}" for number, each in enumerate(NONSENSE)]
)
def test_a_hook_that_returns_nonsense_breaks_a_rule(hook: str, returns: Any, said: str) -> None:
    found = judged(USES[hook], subject(spoilt(hook, lambda *_: returns)))
    assert found.verdict is Verdict.FAIL
    assert "R1: " in found.found
    assert said in found.found


def test_a_counter_that_is_gone_breaks_a_rule() -> None:
    names = iter([{"failed_reads": 0.0}])
    found = judged("KVC-XFER-002.recompute", subject(spoilt("metrics", lambda _: next(names, {}))))
    assert "metrics() no longer has failed_reads" in found.found


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.host.send(None, b""), "send() needs the name of its receiver, got NoneType"),
        (lambda c: c.host.send("p.1", "text"), "send() takes bytes, got str 'text'"),
        (lambda c: c.host.send("p.1", b"", rank="x"), "send() takes ranks by their numbers"),
        (lambda c: c.host.ask("7000", b"", print), "ask() needs a port's number"),
        (lambda c: c.host.ask(7000, b"", None), "ask() needs a port's number"),
        (lambda c: c.host.later(0.5, print), "later() needs whole nanoseconds"),
        (lambda c: c.memory.read(7, [0], [0]), "read() needs the name of an engine, got int 7"),
        (lambda c: c.memory.read("p.1", [0], [192]), "read() into blocks that there are not: list [192]"),
        (lambda c: c.memory.read("p.1", [-1], [0]), "read() of blocks that there are not: list [-1]"),
        (lambda c: c.memory.read("nobody", [0, 1], [0]), "read() needs as many blocks to copy as places, got 2 and 1"),
        (lambda c: c.memory.read("nobody", "01", [0]), "read() of takes a list of block numbers, got str '01'"),
        (lambda c: c.memory.generations([500]), "generations() blocks that there are not"),
    ],
)
def test_nonsense_to_the_host_or_the_memory_is_the_connectors(call: Callable[[Any], Any], said: str) -> None:
    found = judged(GOOD, subject(spoilt("step", call)))
    assert found.verdict is Verdict.FAIL
    assert f"Misuse: {said}" in found.found


@pytest.mark.parametrize(
    "meaning", [lambda _: None, lambda _: (1, 2), raising(KeyError("x")), lambda _: ("heartbeat", ()), lambda: None]
)
@pytest.mark.parametrize("case", [GOOD, "KVC-LEASE-003.never-back"])
def test_a_meaning_that_is_none_is_the_subjects(meaning: Any, case: str) -> None:
    found = judged(case, subject(step(4).Connector, meaning=meaning))
    assert found.verdict is Verdict.FAIL
    assert "R1: the subject cannot say what a message means" in found.found


@pytest.mark.parametrize("factory", [raising(KeyError("x")), lambda *_: None, lambda *_: Strange(), lambda: None])
def test_an_engine_that_does_not_come_up(factory: Any) -> None:
    found = judged(GOOD, subject(factory))
    assert found.verdict is Verdict.FAIL
    assert "R1: p.1 does not come up" in found.found


# -- engines of their own -------------------------------------------------------------------------------------------


class Wrapped:
    """An engine that a third party wrote, with one method spoilt."""

    def __init__(self, good: Any, method: str, does: Callable[..., Any]) -> None:
        self._good, self._spoilt, self._does = good, method, does

    def __getattr__(self, name: str) -> Any:
        return self._does if name == self._spoilt else getattr(self._good, name)


class Own:
    """A subject with engines of its own."""

    def __init__(self, method: str, does: Callable[..., Any]) -> None:
        self._good = subject(step(4).Connector)
        self.name, self.versions, self.capabilities = "own", {"own": "1"}, self._good.capabilities
        self.meaning, self.close = self._good.meaning, self._good.close
        self._method, self._does = method, does

    def engine(self, *of: Any) -> Any:
        return Wrapped(self._good.engine(*of), self._method, self._does)


ENDING = Ending(request_id="r1", how=How.ANSWERED)
ENGINES = [
    ("ended", None, "ended() must return a list of Ending, got NoneType"),
    ("ended", ["r1"], "ended() must return a list of Ending, got one with str 'r1'"),
    ("ended", [Ending(request_id="x", how=How.ANSWERED)], "ended() tells of x, which was never asked of p.1"),
    ("ended", [Ending(request_id="r1", how="well")], "ended() returns an Ending that is none"),  # type: ignore[arg-type]
    ("ended", [Ending(request_id="r1", how=How.ANSWERED, right="yes")], "an Ending that is none"),  # type: ignore[arg-type]
    ("holds", None, "holds() must return request ids with their block numbers"),
    ("holds", {7: [0]}, "holds() must name requests by their ids, got int 7"),
    ("holds", {"r1": None}, "holds() must give block numbers for r1"),
    ("holds", {"r1": "abc"}, "holds() must give block numbers for r1"),
    ("holds", {"r1": [1_000_000]}, "holds() gives r1 blocks that there are not: p.1 has 192"),
    ("holds", {"r1": [-1]}, "holds() gives r1 blocks that there are not"),
]  # fmt: skip


@pytest.mark.parametrize("does", [lambda: None, lambda _self, _a, _b, _c, _d: None, lambda *_, _must: None])
@pytest.mark.parametrize("hook", USES)
def test_a_hook_that_takes_something_else_is_the_connectors(hook: str, does: Callable[..., Any]) -> None:
    found = judged(GOOD, subject(spoilt(hook, does)))
    assert found.verdict is Verdict.FAIL
    assert f"R1: p.1 does not come up: Misuse: {hook}() must take (" in found.found


@pytest.mark.parametrize(("method", "returns", "said"), ENGINES)
def test_an_engine_that_returns_nonsense_breaks_a_rule(method: str, returns: Any, said: str) -> None:
    found = judged(LATER, Own(method, lambda *_: returns))
    assert found.verdict is Verdict.FAIL
    assert said in found.found


@pytest.mark.parametrize("method", ["submit", "step", "ended", "holds", "close"])
def test_an_engine_that_raises_breaks_a_rule(method: str) -> None:
    found = judged(LATER, Own(method, raising(KeyError("x"))))
    assert found.verdict is Verdict.FAIL
    assert "R1: p.1 " in found.found
    assert "KeyError" in found.found


def test_no_engine_breaks_a_rule() -> None:
    made = Own("", print)
    made.engine = lambda *_: object()  # type: ignore[method-assign]
    assert "what engine() returns is no engine, it has no submit, abort, " in judged(LATER, made).found


# -- processes ------------------------------------------------------------------------------------------------------

MODULE = """
import os, pathlib, shutil, subprocess, sys, time
import step_4

FOLDER = os.getcwd()

class Connector(step_4.Connector):
    {hook}

def make_subject():
    subject = step_4.make_subject()
    subject._factory = Connector
    return subject
"""
CHANGED = "import step_4\ndef make_subject():\n s = step_4.make_subject()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def ran(
    tmp_path: Path, module: str, *, limit_s: float = 20.0, cases: tuple[str, ...] = (GOOD, LATER)
) -> ConformanceRun:
    (tmp_path / "stranger.py").write_text(module)
    plan = Plan(
        subject=SubjectName(connector="stranger:make_subject"), python=sys.executable, seed=2, out=tmp_path / "out",
        twins=False, command=[], environment={"PYTHONPATH": f"{tmp_path}:{STEPS}"}, case_limit_s=limit_s,
    )  # fmt: skip
    return run([CASES[case] for case in cases], plan, lambda _: None)


def with_step(body: str) -> str:
    """Return a connector whose every step begins so."""
    lines = textwrap.indent(body, " " * 8).lstrip()
    return MODULE.format(hook=f"def step(self):\n        {lines}\n        return super().step()")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(1000)", "R1: it did not come to an end within 2 s"),
        ("while True: pass", "R1: it did not come to an end within 2 s"),
        ("os._exit(0)", "R1: its process ended with exit code 0"),
        ("sys.exit(7)", "R1: its process ended with exit code 7"),
        ("os.kill(os.getpid(), 11)", "R1: its process ended by SIGSEGV"),
        ("os.closerange(3, 100)", "R1: its process "),
        ("os.write(int(sys.argv[1]), b'nonsense\\n')", "R1: its process answers nonsense"),
    ],
)
def test_a_process_that_is_lost_is_a_failure_and_the_run_goes_on(
    tmp_path: Path, temporary: Path, body: str, said: str
) -> None:
    found = ran(tmp_path, with_step(body), limit_s=2.0)
    assert [result.verdict for result in found.results] == [Verdict.FAIL, Verdict.FAIL]
    assert all(result.found.startswith(said) for result in found.results), [r.found for r in found.results]
    assert found.complete
    assert decided(found, None).exit is Exit.NOT_CONFORMANT
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "body",
    [
        "print('x' * 100_000)\n    sys.stderr.write('y' * 100_000)",
        "shutil.rmtree('.', ignore_errors=True)",
        "shutil.rmtree(FOLDER, ignore_errors=True)",
        "open('left', 'w').write('z' * 1000)",
    ],
    ids=["prints", "empties its folder", "removes its folder", "leaves a file"],
)
def test_what_harms_nobody_changes_no_verdict(tmp_path: Path, temporary: Path, body: str) -> None:
    body = body.replace("\n    ", "\n")
    found = ran(tmp_path, with_step(body))
    assert [result.verdict for result in found.results] == [Verdict.PASS, Verdict.PASS]
    assert list(temporary.iterdir()) == []


def test_what_it_started_ends_with_it(tmp_path: Path, temporary: Path) -> None:
    note = tmp_path / "pid"
    starts = "p.write_text(str(subprocess.Popen(['sleep', '900']).pid))"
    ran(tmp_path, with_step(f"p = pathlib.Path({str(note)!r})\nif not p.exists(): {starts}"), cases=(GOOD,))
    folder = Path(f"/proc/{int(note.read_text())}")
    until(lambda: not folder.exists() or " Z " in (folder / "stat").read_text(), 10.0, "what it started has ended")


def test_a_subject_that_can_be_made_once_only_fails_its_cases(tmp_path: Path, temporary: Path) -> None:
    once = f"import pathlib\np = pathlib.Path({str(tmp_path / 'once')!r})\nassert not p.exists()\np.touch()\n"
    found = ran(tmp_path, once + with_step("os._exit(3)"))
    assert found.results[0].found == "R1: its process ended with exit code 3"
    assert "AssertionError" in found.results[1].found
    assert found.results[1].verdict is Verdict.FAIL
    assert found.complete


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def make_subject(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(5)", "its process ended with exit code 5"),
        ("make_subject = 7", "stranger has no function make_subject"),
        ("def make_subject(): return None", "it has no name, versions, capabilities, engine, meaning"),
        ("def make_subject(): raise KeyError('x')", "KeyError: 'x'"),
        (f"{CHANGED}; s.name = 7\n return s", "its name must be a text"),
        (f"{CHANGED}; s.versions = ['1']\n return s", "its versions must be texts"),
        (f"{CHANGED}; s.capabilities = {{'magic'}}\n return s", "it claims magic; there are leases, "),
        (f"{CHANGED}; s.capabilities = 'leases'\n return s", "its capabilities must be a set"),
    ],
)  # fmt: skip
def test_a_subject_that_cannot_be_made_is_said_in_one_line(
    tmp_path: Path, temporary: Path, module: str, said: str
) -> None:
    with pytest.raises(BadSubject) as caught:
        ran(tmp_path, module)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is Exit.CONFIGURATION
    assert list(temporary.iterdir()) == []


def test_a_module_that_hangs_is_no_subject(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.conformance.process.START_LIMIT_S", 2.0)
    with pytest.raises(BadSubject, match="did not come to an end within 2 s"):
        ran(tmp_path, "import time; time.sleep(1000)")
    assert list(temporary.iterdir()) == []


def test_paths_count_from_where_the_command_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "stranger.py").write_text("from step_4 import make_subject")
    monkeypatch.chdir(tmp_path)
    process = SubjectProcess(
        SubjectName(connector="stranger:make_subject"), sys.executable, tmp_path / "log",
        {"PYTHONPATH": f"here:{os.path.relpath(STEPS)}"},
    )  # fmt: skip
    try:
        assert process.start().subject == "step 4"
    finally:
        process.close()


@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        (with_step("raise KeyError('x')"), 1, "KVC-REL-001.read"),
        ("import no_such_module", 78, "No module named 'no_such_module'"),
    ],
)
def test_the_command_ends_as_it_should(tmp_path: Path, module: str, code: int, said: str) -> None:
    (tmp_path / "stranger.py").write_text(module)
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [str(BIN / "pdproof"), "conform", "--connector", "stranger:make_subject", "--case", "KVC-REL-001",
         "--out", "out"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(STEPS), "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
