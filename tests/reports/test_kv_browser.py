"""The page of prefill/decode runs in headless Chromium: nothing complains, nothing sticks out, the charts are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports import chromium
from tests.reports.fits import assert_fits
from tests.reports.kv_runs import ARMS, d_crash, two_turn
from tests.reports.test_kv_page import drawn

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    crash = drawn(tmp_path_factory.mktemp("crash"), *(d_crash(arm) for arm in ARMS))
    turns = drawn(tmp_path_factory.mktemp("turns"), two_turn(), two_turn("lease-uncorrected"))
    return [crash / "index.html", turns / "index.html"]


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 900, 600, 390])
def test_a_page_fits_its_window_and_shows_its_charts(
    pages: list[Path], browser: chromium.Browser, width: int, dark: bool
) -> None:
    for page, charts in zip(pages, (3, 4), strict=True):
        assert_fits(browser, page, width, dark=dark, charts=charts)
        scaled = browser.value(
            "[...document.querySelectorAll('.sized svg')].filter(s => s.getBoundingClientRect().width > 0)"
            ".map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
        )
        assert all(0.8 < share < 1.5 for share in scaled), scaled  # text keeps about its size
        line = browser.value("getComputedStyle(document.querySelector('.sized svg path[stroke^=var]')).stroke")
        assert line.startswith("rgb(")
        assert line != "rgb(0, 0, 0)"  # the page's variables reach into the drawings
        tones = browser.value("[...document.querySelectorAll('td.lease > .main')].map(e => getComputedStyle(e).color)")
        assert len(set(tones)) == 1
        bars = browser.value(
            "[...document.querySelectorAll('.true.designs strong')].map(s => s.getBoundingClientRect().right)"
        )
        assert all(right <= width for right in bars), bars
    assert browser.problems == []
