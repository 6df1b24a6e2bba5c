"""What the documentation says can be done: the guide is followed to the letter, every other command at least exists."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))),
]
BIN = Path(sys.executable).parent


class Block(NamedTuple):
    """A fenced block: its language, the rest of its info string, its text."""

    language: str
    mark: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    for info, text in re.findall(r"^```(.*?)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
        language, _, mark = info.strip().partition(" ")
        yield Block(language, mark, text)


def commands(page: str) -> list[list[str]]:
    """Return the words of every command line in the page's shell blocks."""
    lines = [line for b in blocks(page) if b.language == "sh" for line in b.text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@functools.cache
def output(*command: str) -> str:
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    ).stdout


def unknown(words: list[str]) -> str:
    """Return what of a command does not exist, "" if all of it does."""
    name, options = words[0], [w.partition("=")[0] for w in words if w.startswith("--")]
    if name == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        return "" if set(words[1:]) <= set(targets) else f"make {words[1:]}"
    if name == "pdproof-engine":
        known = output(name, "--help")
    elif name == "pdproof":
        known = output("pdproof", words[1], "--help")
    elif name == "locust":
        known = output("locust", "--help") + output("locust", "-f", words[2], "--help-load")
        options += [] if (ROOT / words[2]).is_file() else [words[2]]
    elif name == "python":
        if importlib.util.find_spec(words[2]) is None:
            return words[2]
        known = output("python", "-m", words[2], "--help")
    else:
        return "" if name in ("curl", "cp", "pip") else name
    if "sage:" not in known:
        return " ".join(words[:2])
    return " ".join(o for o in options if o not in known)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    assert {" ".join(words): wrong for words in commands(page) if (wrong := unknown(words))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "make nonsense",
        "pdproof nonsense",
        "pdproof run x --nonsense",
        "locust -f nowhere.py",
        "python -m no_such",
        "rm x",
    ],
)
def test_a_command_that_does_not_exist_is_caught(line: str) -> None:
    assert unknown(shlex.split(line))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / page).read_text())
    here = (ROOT / page).parent
    assert [link for link in links if not link.startswith("http") and not (here / link).exists()] == []


def counts(text: str, pattern: str) -> tuple[int, int]:
    """Return how many rules were tried and how many are kept, as a text tells it, wherever its lines break."""
    found = re.findall(pattern, " ".join(text.split()))
    assert len(found) == 1, found
    tried, kept = map(int, found[0])
    return tried, kept


def test_the_readme_counts_rules_as_the_findings_do() -> None:
    document = "docs/findings/vllm-0.32.md"
    readme = (ROOT / "README.md").read_text()
    assert f"]({document})" in readme
    told = counts(readme, r"of (\d+) rules that were tried it keeps (\d+)")
    findings = (ROOT / document).read_text()
    assert told == counts(findings, r"Of (\d+) rules that were tried, \S+ keeps (\d+)")
    _, kept = findings.split("\n## Rules that are kept\n")
    assert told[1] == kept.partition("\n## ")[0].count("\n### ")  # what it counts is what it lists


def test_the_guide_can_be_followed_to_the_letter(tmp_path: Path) -> None:
    """Each file is written and each command run, in order. A busy machine may make a run inconclusive: exit code 3."""
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = 0
    for block in blocks("docs/guide.md"):
        if block.mark.startswith("file="):
            (tmp_path / block.mark.removeprefix("file=")).write_text(block.text)
        elif block.mark == "run":
            lines = (
                block.text.splitlines()
                if block.language == "sh"
                else [f"{sys.executable} -c {shlex.quote(block.text)}"]
            )
            for line in lines:
                ran = subprocess.run(
                    ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
                    check=False,
                )  # fmt: skip
                assert ran.returncode in ((0, 3) if line.startswith("pdproof run") else (0,)), f"{line}\n{ran.stderr}"
                done += 1
    assert done == 6
    assert (tmp_path / "page" / "index.html").stat().st_size > 10_000
    assert (tmp_path / "page" / "summary.json").is_file()
