"""The options of each load: their names, defaults, limits and help. Pure; `locustfile.py` hands them to locust."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

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
    """What every load can be asked for. 0 and "" mean "not given"."""

    seed: int = 0
    duration_s: float = 0.0
    rows: str = ""
    request_timeout_s: float = 600.0
    drain_s: float = 120.0
    start_at_ns: int = 0
    model: str = ""
    api: Api = Api.COMPLETIONS
    prompt_format: str = ""
    strict_openai: bool = False
    logprobs: bool = False

    @property
    def format(self) -> PromptFormat:
        """Token ids where the API takes them, text where it does not."""
        if self.prompt_format:
            return PromptFormat(self.prompt_format)
        return PromptFormat.IDS if self.api is Api.COMPLETIONS else PromptFormat.TEXT

    def check(self) -> None:
        """Raise `BadOption` for values that do not go together."""
        if self.logprobs and self.api is Api.CHAT:
            raise BadOption("--logprobs needs --api completions: a chat answer words them otherwise")
        if self.api is Api.CHAT and self.format is PromptFormat.IDS:
            raise BadOption("--prompt-format ids needs --api completions: a chat message is text")

    def check_start(self, now_ns: int) -> None:
        """Raise `BadOption` if `start_at_ns` is given and not near `now_ns`."""
        ahead_s = (self.start_at_ns - now_ns) / 1e9
        if self.start_at_ns and not -START_PAST_S_MAX <= ahead_s <= START_AHEAD_S_MAX:
            raise BadOption(
                f"--start-at-ns is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'ago'}; it must be this machine's "
                f"CLOCK_MONOTONIC, from {START_PAST_S_MAX:g} s ago to {START_AHEAD_S_MAX:g} s ahead"
            )


class ArrivalOptions(LoadOptions, frozen=True, kw_only=True):
    """A load whose starts are drawn."""

    rate_per_s: float = 0.7
    arrivals: Arrivals = Arrivals.POISSON
    input_tokens: int = 32_000
    output_tokens: int = 1_000

    @property
    def arrivals_max(self) -> int:
        """End after so many arrivals; 0: no such limit."""
        return 0


class PdOptions(ArrivalOptions, frozen=True, kw_only=True):
    """Requests that stand alone."""

    requests: int = 0
    prefix_groups: int = 0
    prefix_tokens: int = 0

    @property
    def arrivals_max(self) -> int:
        """A request is an arrival."""
        return self.requests

    def check(self) -> None:
        """Raise `BadOption` for values that do not go together."""
        super().check()
        if (self.prefix_groups > 0) != (self.prefix_tokens > 0):
            raise BadOption("--prefix-groups and --prefix-tokens are given together or not at all")
        if self.prefix_tokens > self.input_tokens:
            raise BadOption(
                f"--prefix-tokens must be at most --input-tokens ({self.input_tokens}), got {self.prefix_tokens}"
            )


class SessionOptions(ArrivalOptions, frozen=True, kw_only=True):
    """Sessions of some turns, with think time in between."""

    input_tokens: int = 8_000
    output_tokens: int = 200
    sessions: int = 0
    turns: int = 3
    turn_tokens: int = 500
    think_s: str = "5"
    kv_handoff: bool = True
    keep_alive_s: float = 0.0

    @property
    def arrivals_max(self) -> int:
        """A session's first turn is an arrival."""
        return self.sessions

    @property
    def thinks_s(self) -> tuple[float, ...]:
        """The think times of which one is drawn for each turn."""
        return tuple(map(float, self.think_s.split(",")))

    def check(self) -> None:
        """Raise `BadOption` for values that do not go together."""
        super().check()
        if self.strict_openai:
            raise BadOption("--strict-openai leaves out return_token_ids, and a next turn repeats the answer's tokens")
        if self.keep_alive_s and not self.kv_handoff:
            raise BadOption("--keep-alive-s renews hand-offs, so it has no place beside --no-kv-handoff")


class TraceOptions(LoadOptions, frozen=True, kw_only=True):
    """A trace: it says when requests start, how long they are, and what they share."""

    trace: str = ""
    requests: int = 0
    time_scale: float = 1.0
    length_scale: float = 1.0

    def check(self) -> None:
        """Raise `BadOption` for values that do not go together."""
        super().check()
        if not self.trace:
            raise BadOption("name a trace with --trace FILE (one of our own: workloads/traces/sample.jsonl)")


Options = TypeVar("Options", bound=LoadOptions)


def from_namespace(namespace: object, kind: type[Options]) -> Options:
    """Return the options that a parser (or locust's web form) filled in. Raises `BadOption`."""
    given = {name: getattr(namespace, name) for name in kind.__struct_fields__}
    try:
        options = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadOption(f"the load's options: {error}") from None
    _check_values(options)
    options.check()
    return options


def _check_values(options: LoadOptions) -> None:
    """Repeat the parser's checks of values: what locust's web form sends did not pass through the parser."""
    for name in options.__struct_fields__:
        if (parse := _CHECKED.get(name)) is None:
            continue
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


def _think(text: str) -> str:
    for part in text.split(","):
        try:
            _THINK(part)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"each time (they are split by commas) {error}") from None
    return text


_THINK: Final = _number(float, 0, 1e6)
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "rate_per_s": {
        "type": _number(float, 0, RATE_PER_S_MAX, above=True), "metavar": "RATE",
        "help": "requests that start a second, or sessions, on average",
    },
    "arrivals": {"choices": [str(a) for a in Arrivals], "help": "law of the gaps between starts"},
    "trace": {"type": _trace, "metavar": "FILE", "help": "the trace (JSON lines in the Mooncake format)"},
    "time_scale": {"type": _number(float, 0, 1e6, above=True), "help": "requests start so many times faster"},
    "length_scale": {
        "type": _number(float, 0, 1e3, above=True),
        "help": "inputs, outputs and prefix blocks are so many times as long, and at least 1 token",
    },
    "input_tokens": {"type": _number(int, 1, TOKENS_MAX), "help": "tokens of a prompt, in a session of the first"},
    "output_tokens": {"type": _number(int, 1, TOKENS_MAX), "help": "tokens of an answer (max_tokens)"},
    "sessions": {"type": _number(int, 0, 2**31), "help": "end after so many sessions; 0: no such limit"},
    "turns": {"type": _number(int, 1, 10_000), "help": "requests of a session, one after the other"},
    "turn_tokens": {
        "type": _number(int, 1, TOKENS_MAX),
        "help": "new tokens of each later turn; before them it repeats the turn before and its answer",
    },
    "think_s": {
        "type": _think, "metavar": "S[,S...]",
        "help": "time from a turn's end to the next turn's start; of several, one is drawn for each turn",
    },
    "kv_handoff": {
        "action": argparse.BooleanOptionalAction,
        "help": "send the kv_transfer_params that a turn's answer ends with in the next turn (two-turn mode)",
    },
    "keep_alive_s": {
        "type": _number(float, 0, 1e6),
        "help": "during think time renew the hand-off so often (POST /v1/kv/renew); 0: never",
    },
    "seed": {"type": _number(int, 0, 2**63), "help": "of all chance: arrivals, prompts, prefix groups, think times"},
    "requests": {"type": _number(int, 0, 2**31), "help": "end after so many requests; 0: no such limit"},
    "duration_s": {
        "type": _number(float, 0, 1e7),
        "help": "no arrival after so long; 0: no limit. Unlike -t the same load every time",
    },
    "prefix_groups": {
        "type": _number(int, 0, 2**31), "help": "how many different prefixes the prompts share; 0: none"
    },
    "prefix_tokens": {"type": _number(int, 0, TOKENS_MAX), "help": "tokens of a shared prefix"},
    "rows": {
        "type": _rows, "metavar": "FILE", "help": "write a JSON line a request; with --processes FILE gets -<worker>"
    },
    "request_timeout_s": {
        "type": _number(float, 0, 1e6, above=True), "help": "a request without an end by then is unknown"
    },
    "drain_s": {
        "type": _number(float, 0, 1e6),
        "help": "how long running requests may go on after the last start or a stop; then they are unknown. Ctrl-C and "
        "SIGTERM wait for none",
    },
    "start_at_ns": {
        "type": _number(int, 0, 2**63), "help": "the schedule's origin on this machine's CLOCK_MONOTONIC; 0: soon"
    },
    "model": {"help": "model to ask for; by default the first that the host lists"},
    "api": {"choices": [str(a) for a in Api], "help": "completions or chat"},
    "prompt_format": {"choices": [str(f) for f in PromptFormat], "help": "default: ids, for chat text"},
    "strict_openai": {
        "action": "store_true", "help": "leave out ignore_eos and return_token_ids, which only vLLM knows"
    },
    "logprobs": {
        "action": "store_true", "help": "ask for the logarithm of each token's probability, and keep it in the rows"
    },
}  # fmt: skip
_CHECKED: Final = {
    name: more["type"] for name, more in _OPTIONS.items() if name not in {"rows", "trace"} and "type" in more
}


def add_options(parser: Any, kind: type[LoadOptions], locustfile: str) -> None:
    """Add the options of a `kind` of load to locust's `parser`, in a group of their own, and to its web form."""
    group = parser.add_argument_group(
        GROUP,
        "The load of pdproof: an open loop of streamed requests. Locust's -u and -r are ignored: the schedule alone "
        "says when a request starts.",
    )
    # Locust listens on every interface unless told otherwise; we listen on loopback unless told otherwise.
    parser.set_defaults(web_host=LOOPBACK, master_bind_host=LOOPBACK)
    defaults = kind()
    for name in _OPTIONS:
        if name in kind.__struct_fields__:
            _add(group, name, getattr(defaults, name))
    group.add_argument(
        "--help-load", action=_LoadHelp, nargs=0, default=argparse.SUPPRESS, help="show these options",
        kind=kind, locustfile=locustfile,
    )  # fmt: skip


def _add(group: Any, name: str, default: Any) -> None:
    more = dict(_OPTIONS[name])
    if not {"action", "choices"} & more.keys():
        more.setdefault("metavar", name.rsplit("_", 1)[-1].upper())
    if default not in ("", 0, False):
        more["help"] += f" (default {'on' if default is True else default})"
    action = group.add_argument(f"--{name.replace('_', '-')}", default=default, **more)
    # A group's arguments lack what locust's own `add_argument` sets; without it the web form leaves them out.
    action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = True, False, False, False


class _LoadHelp(argparse.Action):
    """Prints the load's own options: locust answers --help before it has read the locustfile, so without them."""

    def __init__(self, *given: Any, kind: type[LoadOptions], locustfile: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self._kind = kind
        self._locustfile = locustfile

    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        own = argparse.ArgumentParser(
            prog="locust", usage=f"locust -f {self._locustfile} [--host URL] [--headless] [options]", add_help=False
        )
        add_options(own, self._kind, self._locustfile)
        own.print_help()
        parser.exit()


def shard_path(rows: str, worker: int, workers: int) -> Path:
    """Return where worker `worker` of `workers` writes its rows."""
    path = Path(rows)
    return path if workers == 1 else path.with_name(f"{path.stem}-{worker}{path.suffix}")
