"""Commands whose exit codes are those of `harness.conformance.exits`, whatever ends them."""

from __future__ import annotations

import os
from typing import Any

import click

from harness.conformance.exits import Exit
from harness.errors import PdproofError


class OurFault(PdproofError):
    """A mistake in pdproof itself."""

    exit_code = Exit.OUR_FAULT


class WrongUsage(click.UsageError):
    """The command line is wrong."""

    exit_code = Exit.USAGE


class SysexitsCommand(click.Command):
    """A command where 2 is a verdict: wrong usage ends with 64, and a mistake of ours with 70."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the command line."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise WrongUsage(error.format_message(), error.ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WrongUsage(error.format_message(), error.ctx) from error
        except (PdproofError, OSError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if "PDPROOF_TRACEBACK" in os.environ:
                raise
            problem = f"internal error, {type(error).__name__}: {error}; a bug: please report it"
            raise OurFault(f"{problem}. PDPROOF_TRACEBACK=1 shows where") from error
