"""The command `pdproof`. Commands are found by entry points, so that this floor knows nothing of the one above.

Exit codes: see `harness.errors`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib.metadata import entry_points

import click
from click.exceptions import Abort, ClickException
from click.exceptions import Exit as ClickExit

from harness.errors import PdproofError

GROUP = "pdproof.commands"
INTERRUPTED = 130
TRACEBACK_VARIABLE = "PDPROOF_TRACEBACK"


class Commands(click.Group):
    """A group whose commands are loaded when they are asked for."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(point.name for point in entry_points(group=GROUP))

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, None if there is none."""
        for point in entry_points(group=GROUP, name=cmd_name):
            command = point.load()
            assert isinstance(command, click.Command)
            return command
        return None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdproof", prog_name="pdproof")
def pdproof() -> None:
    """Prove whether a disaggregated LLM-serving deployment survives what production does to it."""


def main() -> None:
    """Run a command; every failure that can be foreseen is one clear line and an exit code of its own."""
    # A shell without job control starts background commands with SIGINT ignored; a run must end by it all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(pdproof.main(standalone_mode=False) or 0)
    except ClickExit as end:
        sys.exit(end.exit_code)
    except ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (Abort, KeyboardInterrupt):
        _say("interrupted; everything that was started has been ended")
        sys.exit(INTERRUPTED)
    except PdproofError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _say(f"{error.filename or 'this machine'}: {error.strerror or error}; free or change it and try again")
        _drop_output()
        sys.exit(7)
    except Exception as error:
        if TRACEBACK_VARIABLE in os.environ:
            raise
        _say(
            f"internal error, {type(error).__name__}: {error}; a bug, or a file that was changed by hand. "
            f"{TRACEBACK_VARIABLE}=1 shows where"
        )
        sys.exit(PdproofError.exit_code)


def _drop_output() -> None:
    """Forget what standard output could not take, or Python would complain of it once more at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    click.echo(f"pdproof: {text}", err=True)
