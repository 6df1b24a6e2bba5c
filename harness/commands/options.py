"""Option types that several commands share."""

from __future__ import annotations

import math
from typing import Any, Final

import click

TIME_SCALE_MIN: Final = 0.01
TIME_SCALE_MAX: Final = 1000.0
SEED_MAX: Final = 2**63 - 1


class TimeScale(click.FloatRange):
    """A number that durations can be divided by. NaN lies in no range, but compares so that it passes one."""

    def __init__(self) -> None:
        super().__init__(min=TIME_SCALE_MIN, max=TIME_SCALE_MAX)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


TARGET: Final = click.option(
    "--target", default="reference", show_default=True, metavar="NAME|FILE",
    help="what is put under test: reference, vllm, dynamo, or a .toml file that describes a vLLM",
)  # fmt: skip
SEED: Final = click.IntRange(0, SEED_MAX)
PORT: Final = click.IntRange(0, 65535)
