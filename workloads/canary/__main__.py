"""Makes the canary model in a folder (by default in the cache) and prints the path: `python -m workloads.canary`."""

from __future__ import annotations

from pathlib import Path

import click

from workloads.canary.model import canary_folder, make_canary


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def main(folder: Path | None) -> None:
    """Make the canary model in FOLDER, unless it is there, and print its path."""
    try:
        click.echo(make_canary(folder or canary_folder()))
    except OSError as error:
        raise click.ClickException(f"the canary model cannot be made: {error}") from error


if __name__ == "__main__":
    main()
