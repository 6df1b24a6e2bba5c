"""Progress on the terminal: one live line where there is a terminal, plain lines where there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class RunProgress(AbstractContextManager["RunProgress"]):
    """What a run tells while it goes on. `label` stands in front, for example the arm."""

    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._label = label
        self._bar = Progress(
            SpinnerColumn(), TextColumn("[bold]{task.fields[label]}[/] {task.description}"), BarColumn(bar_width=24),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=None, label=label)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: {text}", highlight=False, soft_wrap=True)

    def total(self, seconds: float) -> None:
        """Say how long the measured part will take; from here on `advance` moves the bar."""
        self._bar.update(self._task, total=seconds, completed=0.0)

    def advance(self, seconds: float) -> None:
        """Say that so many seconds more of the measured part have passed."""
        self._bar.update(self._task, advance=seconds)
