"""Data files that come with a package, or that the user wrote: named, or given by path."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class BadToml(Exception):
    """A file cannot be used; the message is one line that says which one and why."""


def names(package: str) -> list[str]:
    """Return the names of the TOML files in `package`."""
    files = resources.files(package).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load(what: str, name: str, package: str, kind: type[T]) -> T:
    """Return the file of this name in `package`, or at this path (it ends in .toml), as a `kind`. Raises BadToml."""
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text()
        elif name in names(package):
            text = resources.files(package).joinpath(f"{name}.toml").read_text()
        else:
            known = ", ".join(names(package))
            raise BadToml(f"{what} {name!r}: unknown; there are {known}, or give a .toml file")
        return msgspec.convert(tomllib.loads(text), kind)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadToml(f"{what} {name}: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadToml(f"{what} {name}: {error}") from error
