"""A chart over the page's whole width, drawn once for each width of column, so that its text is never scaled far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import altair as alt
import msgspec
from markupsafe import Markup

from reports.figures.style import NARROW, WIDE, svg

SIZES: Final = {"xl": 1088, "l": 780, "m": WIDE, "s": NARROW}
"""Class of the style sheet -> pixels."""


class Sized(msgspec.Struct, frozen=True):
    """One drawing and the class of widths that it is shown at."""

    size: str
    svg: Markup


def sized(chart: Callable[[int], alt.LayerChart], height: int, label: str, *, right: int) -> list[Sized]:
    """Return `chart` (a function of the width) at every size; `right` pixels of each are right of the plot."""
    return [Sized(size, svg(chart(width), width, height, label, right=right)) for size, width in SIZES.items()]
