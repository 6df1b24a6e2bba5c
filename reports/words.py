"""Figures as words: one way to print a duration, a rate, a ratio or a size, everywhere on a page."""

from __future__ import annotations

import re

from harness.words import counted
from reference_impl.rules.events import Scalar

NONE = "–"
ARM_TITLES = {"cold": "Cold start", "shadow": "Shadow", "lease": "Leases"}
UNCORRECTED = "-uncorrected"
TIMEOUT = "single-timeout-"


def significant(value: float) -> str:
    """Return `value` with three significant digits, plain and with thousands separators."""
    rounded = abs(float(f"{value:.3g}"))  # so that 9.996 is 10.0 and not 10.00
    if rounded < 1:
        return f"{value:.3g}" if rounded >= 1e-3 or rounded == 0 else f"{value:.1e}"
    return f"{value:,.{max(0, 3 - len(str(int(rounded))))}f}"


def duration(seconds: float | None) -> str:
    """Return 4.31 ms, 152 ms, 9.43 s or 283 s."""
    if seconds is None:
        return NONE
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995:
        return f"{significant(seconds * 1000)} ms"
    return f"{significant(seconds)} s"


def span(least: float | None, most: float | None) -> str:
    """Return 4.31 ms to 5.02 ms."""
    return "" if least is None or most is None else f"{duration(least)} to {duration(most)}"


def given(text: str) -> str:
    """Return a printed figure without trailing zeros: it was given, not measured to that many digits."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", text).replace(". ", " ")


def milliseconds(value: float | None) -> str:
    """Return a duration given in milliseconds."""
    return NONE if value is None else duration(value / 1000)


def rate(tokens_s: float | None) -> str:
    """Return 46.2 tokens/s."""
    return NONE if tokens_s is None else f"{significant(tokens_s)} tokens/s"


def ratio(value: float | None) -> str:
    """Return 39.0 ×."""
    return NONE if value is None else f"{significant(value)} ×"


def share(part: int, whole: int) -> str:
    """Return 12 of 240."""
    return f"{part:,} of {whole:,}"


def percent(part: int, whole: int) -> str:
    """Return 5 %."""
    return f"{100 * part / whole:.0f} %" if whole else NONE


def size(count: float | None) -> str:
    """Return a number of bytes as MiB or GiB."""
    if count is None:
        return NONE
    if count >= 2**30:
        return f"{significant(count / 2**30)} GiB"
    return f"{significant(count / 2**20)} MiB"


def speed(bytes_per_s: float | None) -> str:
    """Return 2.31 GiB/s."""
    return NONE if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def count(value: float | None, nouns: str = "") -> str:
    """Return 24,000 blocks; `nouns` in the plural."""
    return NONE if value is None else f"{value:,.0f} {nouns}".strip()


def scalar(name: str, value: Scalar) -> str:
    """Return a value of the manifest or of an event; names end in their unit."""
    if value is None or value == "":
        return "none"
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return size(value)
    if name.endswith("_gib"):
        return f"{value} GiB"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def arm_title(arm: str) -> str:
    """Return the arm's name for people."""
    if arm.endswith(UNCORRECTED):
        return f"{arm_title(arm.removesuffix(UNCORRECTED))}, uncorrected"
    if arm.startswith(TIMEOUT):
        return f"Timeout {arm.removeprefix(TIMEOUT)} s"
    return ARM_TITLES.get(arm, "This run")


def arm_colour(arm: str) -> str:
    """Return the arm's colour as a CSS variable of the page."""
    return "var(--cold)" if arm == "cold" else "var(--shadow)"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return 1 kill, 3 kills; 1 crash, 3 crashes, if `many` says so."""
    return counted(count, noun, many)
