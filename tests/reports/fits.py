"""What every page must keep to, in whatever window and light."""

from __future__ import annotations

from pathlib import Path

from tests.reports.chromium import Browser


def assert_fits(browser: Browser, page: Path, width: int, *, dark: bool, charts: int) -> None:
    """Show a page that passes: it is no wider than its window, its charts are all there, and it is as dark as asked."""
    browser.show(page, width, dark=dark)
    assert browser.value("document.title").startswith("Pass")
    wide = browser.value("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1] == width, wide
    boxes = browser.value(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
        ".filter(r => r.width > 0).map(r => [r.width, r.height, r.right])"
    )
    assert len(boxes) == charts
    assert all(w > 200 and h > 80 and right <= width for w, h, right in boxes), boxes
    light = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128")
    assert light is not dark
