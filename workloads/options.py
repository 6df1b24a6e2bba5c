"""The options of the load: their names, defaults, limits and help. Pure; `pd.py` hands them to locust."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from workloads.mooncake import BadTrace, read_trace
from workloads.prompts import Api, PromptFormat
from workloads.schedule import Arrivals

GROUP: Final = "pdproof"
LOOPBACK: Final = "127.0.0.1"
RATE_PER_S_MAX: Final = 100_000.0
TOKENS_MAX: Final = 10_000_000
START_PAST_S_MAX: Final = 60.0
START_AHEAD_S_MAX: Final = 3600.0


class BadOption(ValueError):
    """An option's value cannot be used; the text is one line that names the option and the value."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load as asked for. 0 and "" mean "not given"."""

    rate_per_s: float = 0.7
    arrivals: Arrivals = Arrivals.POISSON
    input_tokens: int = 32_000
    output_tokens: int = 1_000
    seed: int = 0
    requests: int = 0
    duration_s: float = 0.0
    trace: str = ""
    prefix_groups: int = 0
    prefix_tokens: int = 0
    rows: str = ""
    request_timeout_s: float = 600.0
    drain_s: float = 120.0
    start_at_ns: int = 0
    model: str = ""
    api: Api = Api.COMPLETIONS
    prompt_format: str = ""
    strict_openai: bool = False

    @property
    def format(self) -> PromptFormat:
        """Token ids where the API takes them, text where it does not."""
        if self.prompt_format:
            return PromptFormat(self.prompt_format)
        return PromptFormat.IDS if self.api is Api.COMPLETIONS else PromptFormat.TEXT

    def check(self) -> None:
        """Raise `BadOption` for values that do not go together."""
        if self.api is Api.CHAT and self.format is PromptFormat.IDS:
            raise BadOption("--prompt-format ids needs --api completions: a chat message is text")
        if (self.prefix_groups > 0) != (self.prefix_tokens > 0):
            raise BadOption("--prefix-groups and --prefix-tokens are given together or not at all")
        if self.trace and self.prefix_groups:
            raise BadOption("--prefix-groups has no place beside --trace: the trace says what prompts share")
        if not self.trace and self.prefix_tokens > self.input_tokens:
            raise BadOption(
                f"--prefix-tokens must be at most --input-tokens ({self.input_tokens}), got {self.prefix_tokens}"
            )

    def check_start(self, now_ns: int) -> None:
        """Raise `BadOption` if `start_at_ns` is given and not near `now_ns`."""
        ahead_s = (self.start_at_ns - now_ns) / 1e9
        if self.start_at_ns and not -START_PAST_S_MAX <= ahead_s <= START_AHEAD_S_MAX:
            raise BadOption(
                f"--start-at-ns is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'ago'}; it must be this machine's "
                f"CLOCK_MONOTONIC, from {START_PAST_S_MAX:g} s ago to {START_AHEAD_S_MAX:g} s ahead"
            )


def from_namespace(namespace: object) -> LoadOptions:
    """Return the options that a parser (or locust's web form) filled in. Raises `BadOption`."""
    given = {name: getattr(namespace, name) for name in LoadOptions.__struct_fields__}
    try:
        options = msgspec.convert(given, LoadOptions)
    except msgspec.ValidationError as error:
        raise BadOption(f"the load's options: {error}") from None
    _check_numbers(options)
    options.check()
    return options


def _check_numbers(options: LoadOptions) -> None:
    """Repeat the parser's checks: what locust's web form sends did not pass through the parser."""
    for name, (parse, _) in _NUMBERS.items():
        try:
            parse(str(getattr(options, name)))
        except argparse.ArgumentTypeError as error:
            raise BadOption(f"--{name.replace('_', '-')}: {error}") from None


def _number(kind: type[int] | type[float], least: float, most: float, above: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        rule = f"{'above' if above else 'at least'} {least:g} and at most {most:g}"
        wrong = argparse.ArgumentTypeError(
            f"must be {'a whole number' if kind is int else 'a number'} {rule}, got {text!r}"
        )
        try:
            value = kind(text)
        except ValueError:
            raise wrong from None
        if not (least < value if above else least <= value) or not value <= most:
            raise wrong
        return value

    return parse


_NUMBERS: Final[dict[str, tuple[Callable[[str], float], str]]] = {
    "rate_per_s": (_number(float, 0, RATE_PER_S_MAX, above=True), "requests that start a second, on average"),
    "input_tokens": (_number(int, 1, TOKENS_MAX), "tokens of a prompt"),
    "output_tokens": (_number(int, 1, TOKENS_MAX), "tokens of an answer (max_tokens)"),
    "seed": (_number(int, 0, 2**63), "of all chance: arrivals, prompts, prefix groups"),
    "requests": (_number(int, 0, 2**31), "end after so many requests; 0: no such limit"),
    "duration_s": (_number(float, 0, 1e7), "no arrival after so long; 0: no limit. Unlike -t the same load every time"),
    "prefix_groups": (_number(int, 0, 2**31), "how many different prefixes the prompts share; 0: none"),
    "prefix_tokens": (_number(int, 0, TOKENS_MAX), "tokens of a shared prefix"),
    "request_timeout_s": (_number(float, 0, 1e6, above=True), "a request without an end by then is unknown"),
    "drain_s": (
        _number(float, 0, 1e6),
        "how long running requests may go on after the last arrival or a stop; then they are unknown. Ctrl-C and "
        "SIGTERM wait for none",
    ),
    "start_at_ns": (_number(int, 0, 2**63), "the schedule's origin on this machine's CLOCK_MONOTONIC; 0: soon"),
}  # fmt: skip


def _trace(text: str) -> str:
    if text:
        try:
            read_trace(Path(text))
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from None
        except BadTrace as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _rows(text: str) -> str:
    path = Path(text)
    if text and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text}: no file can be made there; name one in a folder that exists")
    if text and path.exists() and (path.stat().st_size or not stat.S_ISREG(path.stat().st_mode)):
        raise argparse.ArgumentTypeError(f"{text} holds something already; name another file or remove it")
    return text


def add_options(parser: Any) -> None:
    """Add the load's options to locust's `parser`, in a group of their own, and to its web form."""
    group = parser.add_argument_group(
        GROUP,
        "The load of pdproof: an open loop of streamed requests. Locust's -u and -r are ignored: the schedule alone "
        "says when a request starts.",
    )
    # Locust listens on every interface unless told otherwise; we listen on loopback unless told otherwise.
    parser.set_defaults(web_host=LOOPBACK, master_bind_host=LOOPBACK)
    defaults = LoadOptions()

    def add(name: str, **more: Any) -> None:
        flag = "--" + name.replace("_", "-")
        with contextlib.suppress(KeyError):
            more["type"], more["help"] = _NUMBERS[name]
        if "action" not in more:
            more.setdefault("metavar", name.rsplit("_", 1)[-1].upper())
        more["help"] += "" if getattr(defaults, name) in ("", 0, False) else f" (default {getattr(defaults, name)})"
        action = group.add_argument(flag, default=getattr(defaults, name), **more)
        # A group's arguments lack what locust's own `add_argument` sets; without it the web form leaves them out.
        action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = True, False, False, False

    add("rate_per_s", metavar="RATE")
    add("arrivals", choices=[str(a) for a in Arrivals], metavar=None, help="law of the gaps between starts")
    for name in ("input_tokens", "output_tokens", "seed", "requests", "duration_s"):
        add(name)
    add("trace", type=_trace, metavar="FILE", help="take starts, lengths and prefixes from a trace (Mooncake JSONL)")
    for name in ("prefix_groups", "prefix_tokens"):
        add(name)
    add("rows", type=_rows, metavar="FILE", help="write a JSON line a request; with --processes FILE gets -<worker>")
    for name in ("request_timeout_s", "drain_s", "start_at_ns"):
        add(name)
    add("model", help="model to ask for; by default the first that the host lists")
    add("api", choices=[str(a) for a in Api], metavar=None, help="completions or chat")
    add("prompt_format", choices=[str(f) for f in PromptFormat], metavar=None, help="default: ids, for chat text")
    add("strict_openai", action="store_true", help="leave out ignore_eos and return_token_ids, which only vLLM knows")
    group.add_argument("--help-load", action=_LoadHelp, nargs=0, default=argparse.SUPPRESS, help="show these options")


class _LoadHelp(argparse.Action):
    """Prints the load's own options: locust answers --help before it has read the locustfile, so without them."""

    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        own = argparse.ArgumentParser(
            prog="locust", usage="locust -f workloads/pd.py [--host URL] [--headless] [options]", add_help=False
        )
        add_options(own)
        own.print_help()
        parser.exit()


def shard_path(rows: str, worker: int, workers: int) -> Path:
    """Return where worker `worker` of `workers` writes its rows."""
    path = Path(rows)
    return path if workers == 1 else path.with_name(f"{path.stem}-{worker}{path.suffix}")
