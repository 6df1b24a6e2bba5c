"""How every chart looks, and how it becomes a fragment of the page.

Charts are drawn once, as SVG without any script. Their colours are the page's CSS variables, so one drawing serves
light and dark; each is drawn for a wide and for a narrow column, so that its text is never scaled down.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

import altair as alt
import msgspec
import vl_convert
from markupsafe import Markup, escape

WIDE: Final = 520
NARROW: Final = 346
FONT: Final = "sans-serif"
_LEFT: Final = 46
RIGHT: Final = 14
_VEGA_LITE: Final = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
_serial = itertools.count()
_rows: dict[str, list[dict[str, Any]]] = {}
"""Rows of charts that are not drawn yet, by unique name."""
_TAG: Final = re.compile(r"<[^>]*>")
_LONG_NUMBER: Final = re.compile(r"-?\d+\.\d{2,}")
_DOT: Final = re.compile(
    r'<path transform="translate\(([^,]*),([^)]*)\)" d="M([\d.]+),0A[^"]*"([^>]*?) stroke-width="[^"]*"([^>]*)'
    r"(/>|><title>[^<]*</title></path>)"
)


class Drawing(msgspec.Struct, frozen=True):
    """One panel, drawn for a wide and for a narrow column."""

    wide: Markup
    narrow: Markup


class Panel(msgspec.Struct, frozen=True):
    """A drawing with its arm ("cold", "shadow" or ""), or words that say why there is none."""

    arm: str
    title: str
    drawing: Drawing | None
    note: str = ""


def axis(**more: Any) -> dict[str, Any]:
    """Return an axis in the style of the house (as a dictionary, which Altair copies far sooner than its `Axis`)."""
    look = {
        "domain": False, "tickColor": "var(--line)", "gridColor": "var(--line)", "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)", "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal",
        "labelPadding": 5, "tickSize": 4,
    }  # fmt: skip
    return look | more


def x_axis(width: int, title: str | None) -> dict[str, Any]:
    """Return the time axis, with as many ticks as `width` has room for."""
    return axis(title=title, grid=False, tickCount=6 if width >= WIDE else 4, titleAnchor="end", titlePadding=4)


def y_axis(**more: Any) -> dict[str, Any]:
    """Return the value axis. Its title stands above the chart, in the page's own words."""
    return axis(**({"title": None, "ticks": False, "minExtent": _LEFT - 10, "maxExtent": _LEFT - 10} | more))


def data(rows: list[dict[str, Any]]) -> alt.NamedData:
    """Return rows as data for a chart that `svg` draws.

    Altair copies and checks inline rows a dozen times over, which takes seconds a page; by name it leaves them alone.
    """
    name = f"rows-{next(_serial)}"
    _rows[name] = rows
    return alt.NamedData(name=name)


def svg(chart: alt.LayerChart, width: int, height: int, label: str, *, right: int = RIGHT) -> Markup:
    """Return `chart` as inline SVG, `width` pixels wide with its axes; `right` of them are right of the plot.

    In a wide drawing, resting the pointer on a mark shows its description; where columns are narrow, nothing hovers.
    """
    dressed = chart.properties(width=width - _LEFT - right, height=height, padding=1, autosize="pad").configure(
        background="transparent", font=FONT, view=alt.ViewConfig(stroke=None)
    )
    spec = dressed.to_dict(validate=False)
    spec["datasets"] = {name: _rows.pop(name) for name in dict.fromkeys(re.findall(r"rows-\d+", json.dumps(spec)))}
    raw = vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)
    return Markup(_clean(raw, label, f"c{next(_serial)}-", tips=width >= WIDE))  # noqa: S704 - our own drawing; its texts are escaped


def _clean(raw: str, label: str, prefix: str, *, tips: bool) -> str:
    """Give the drawing one spoken label, native tooltips, ids of its own and short numbers."""
    text = re.sub(r'<text [^>]*/>|<path class="(?:background|foreground)"[^>]*/>', "", raw)
    text = re.sub(
        r'<path aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="[a-z ]*mark container"', "<path", text
    )
    text = re.sub(
        r'<path aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="(?:point|circle)" ([^>]*)/>',
        r"<path \2><title>\1</title></path>" if tips else r"<path \2/>",
        text,
    )
    text = re.sub(r' (?:role|aria-[a-z]+|pointer-events|stroke-miterlimit)="[^"]*"', "", text)
    text = _DOT.sub(
        lambda m: f'<circle cx="{m[1]}" cy="{m[2]}" r="{m[3]}"{m[4]}{m[5]}{m[6].replace("path", "circle")}', text
    )
    text = re.sub(r' (?:opacity="1"|font-weight="normal"|stroke-width="0")', "", text)
    text = _TAG.sub(lambda tag: _LONG_NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), tag[0]), text)
    text = text.replace(f'font-family="{FONT}"', "").replace("clip", f"{prefix}clip")
    text = text.replace(f"{prefix}clip-path", "clip-path").replace(f"{prefix}clipPath", "clipPath")
    head = f'<svg role="img" aria-label="{escape(label)}" '
    return text.replace("<svg ", head, 1).replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
