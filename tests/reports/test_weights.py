"""How engines share their weights, as their loaders said it: on the page of an arm that has them, and only there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind, Scalar
from reports.page import comparison_page, run_page
from reports.summary import Summary, summarise
from reports.weights import shared_weights
from tests.reports import chromium
from tests.reports.fits import assert_fits
from tests.reports.runs import pair

WRITER: dict[str, Scalar] = {"bytes": 2_261_760, "copied": 16, "duplicated": 0, "generation": 1, "role": "writer"}
READER = WRITER | {"role": "reader"}


def said(run: RunFolder, told: dict[str, dict[str, Scalar]]) -> RunFolder:
    """Have engines say, right after the run began, what they mapped."""
    path = run.path / "events.jsonl"
    header, first, *rest, footer = path.read_bytes().splitlines()
    begun = msgspec.json.decode(first, type=Event)
    more = [
        msgspec.structs.replace(
            begun, kind=EventKind.WEIGHTS_MAPPED, subject=engine, detail={"worker_id": "w0"} | detail
        )
        for engine, detail in told.items()
    ]
    before, after = len(rest) + 1, len(rest) + 1 + len(more)
    assert b'"events":%d,' % before in footer
    footer = footer.replace(b'"events":%d,' % before, b'"events":%d,' % after)
    path.write_bytes(b"\n".join([header, first, *map(msgspec.json.encode, more), *rest, footer]) + b"\n")
    found = RunFolder(run.path)
    assert found.incomplete is None
    return found


def section(page: str) -> str:
    return page.partition('<section id="memory">')[2].partition("</section>")[0]


def test_engines_that_hold_their_weights_alike_are_one_entry_and_one_sentence(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    shadow = said(shadow, {"w0-e0": WRITER, "w0-e1": READER})
    (found,) = shared_weights(shadow)
    assert (found.engines, found.roles) == (["w0-e0", "w0-e1"], ["reader", "writer"])
    assert (found.bytes_mapped, found.bytes_copied, found.bytes_duplicated) == (2_261_760, 16, 0)
    shown = section(comparison_page(cold, shadow, summarise(cold, shadow)))
    sentence = (
        "Weights: 2,261,760 bytes mapped from the memory service and shared by all engines of a worker, 16 bytes "
        "copied by each. So said 2 engines."
    )
    assert sentence in shown
    assert shown.count("Shared weights: ") == 1  # the cold arm's engines said nothing
    assert sentence in section(run_page(shadow))


def test_what_has_a_copy_beside_is_told_apart_from_what_is_only_shared(tmp_path: Path) -> None:
    _, shadow = pair(tmp_path)
    shadow = said(shadow, {"w0-e0": WRITER | {"duplicated": 1}})
    assert "of a worker (1 byte of them with a private copy beside), 16 bytes copied" in section(run_page(shadow))


def test_engines_that_differ_have_figures_of_their_own(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    shadow = said(shadow, {"w0-e0": WRITER, "w0-e1": READER, "w0-e2": READER | {"bytes": 1_000, "copied": 2_260_776}})
    assert [(w.engines, w.bytes_copied) for w in shared_weights(shadow)] == [
        (["w0-e0", "w0-e1"], 16), (["w0-e2"], 2_260_776),
    ]  # fmt: skip
    shown = section(comparison_page(cold, shadow, summarise(cold, shadow)))
    assert "w0-e0, w0-e1<small>reader and writer</small>" in shown
    assert "2,260,776 bytes" in shown
    assert "Weights: " not in shown


def test_who_says_nothing_of_copies_has_no_such_lines(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    shadow = said(shadow, {"w0-e0": {"bytes": 2**30}})  # as the reference implementation's engines do
    assert shared_weights(shadow) == []
    assert "Shared weights" not in comparison_page(cold, shadow, summarise(cold, shadow))


def test_the_summary_holds_it_and_older_ones_without_it_can_be_read(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    summary = summarise(cold, said(shadow, {"w0-e0": WRITER}))
    told = msgspec.to_builtins(summary)
    assert told["shadow"]["weights"][0]["bytes_mapped"] == 2_261_760
    del told["shadow"]["weights"]
    assert msgspec.convert(told, Summary).shadow.weights == []


@pytest.mark.browser
@pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_figures_fit_their_window(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    shadow = said(shadow, {f"w{n % 2}-e{n}": READER | {"copied": 16 + n // 8} for n in range(16)})
    (tmp_path / "index.html").write_text(comparison_page(cold, shadow, summarise(cold, shadow)))
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as browser:
        for width in (1280, 700, 390):
            assert_fits(browser, tmp_path / "index.html", width, dark=width == 700, charts=8)
        assert browser.problems == []
