"""The pages in headless Chromium: nothing complains, nothing sticks out, the charts are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.run_folder import RunFolder
from reports.page import write_run_page
from tests.reports import chromium
from tests.reports.fits import assert_fits
from tests.reports.runs import comparison

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("pages")
    out = comparison("glm-5.2-b200")
    return [out / "index.html", write_run_page(RunFolder(out.parent / "shadow"), home / "report.html")]


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 760, 400])
def test_a_page_fits_its_window_and_shows_its_charts(
    pages: list[Path], browser: chromium.Browser, width: int, dark: bool
) -> None:
    for page, charts in zip(pages, (8, 4), strict=True):
        assert_fits(browser, page, width, dark=dark, charts=charts)
        dot = browser.value("getComputedStyle(document.querySelector('svg circle')).fill")
        assert dot.startswith("rgb(")
        assert dot != "rgb(0, 0, 0)"  # the page's variables reach into the drawings
    assert browser.problems == []
