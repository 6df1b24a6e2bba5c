"""Pages: one HTML file each, that needs no network, no script and no second file."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from harness.errors import MachineLimit
from harness.run_folder import RunFolder
from reports import words
from reports.arms import summarise_arm
from reports.summary import Summary
from reports.view import comparison_view, run_view

PAGES = Path(__file__).parent / "pages"


def comparison_page(cold: RunFolder, shadow: RunFolder, summary: Summary) -> str:
    """Return the page that compares two runs; `summary` is theirs."""
    return render("compare.html", comparison_view(cold, shadow, summary))


def run_page(run: RunFolder) -> str:
    """Return the page of one run."""
    return render("run.html", run_view(run, summarise_arm(run)))


def write_run_page(run: RunFolder, out: Path) -> Path:
    """Write the page of one run to `out` and return that path. Raises `MachineLimit` where it cannot be written."""
    write(out, run_page(run).encode())
    return out


def write(path: Path, content: bytes) -> None:
    """Write `content` whole or not at all: a page cut short would look like a short page."""
    unfinished = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        raise MachineLimit(f"{path}: cannot be written ({error.strerror}); give another place with --out") from error


def render(template: str, view: object) -> str:
    """Return a template of `reports/pages` with `view` as its `v`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"duration": words.duration, "breakable": breakable, "coded": coded}
    style = Markup((PAGES / "style.css").read_text())  # noqa: S704 - our own file
    return environment.get_template(template).render(v=view, style=style)


def breakable(name: str) -> Markup:
    """Return a name that may be broken before its capitals, after its dots and lines, and nowhere else."""
    parts = re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[._-])", name)
    return Markup("<wbr>").join(parts)


def coded(text: str) -> Markup:
    """Return a text in which what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them has no partner
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )
