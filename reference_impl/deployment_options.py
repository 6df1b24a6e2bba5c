"""The options of a deployment's command line, checked before anything is started."""

from __future__ import annotations

import argparse
import math
from typing import Final

import msgspec

from reference_impl.failover.prober import ProbeLimits
from reference_impl.rules.terms import KvTerms, LeaseDesign, LoadPolicy
from reference_impl.time_namespace import OFFSET_MAX_S

WORKERS: Final = 2
RANKS: Final = (1, 2, 4, 8)
DURATIONS: Final = ("kv_lease_duration", "single_timeout", "decoder_kv_blocks_ttl", "read_limit", "load_limit")
"""The fields of `KvTerms` that are seconds."""
_DESCRIPTION: Final = (
    "A reference deployment on this machine: a router and its workers, started, watched and ended together. With "
    "--prefill and --decode the workers are of two kinds, and KV moves between them."
)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked; `terms` is a `KvTerms`, scaled. Ends with one clear line and exit code 2."""
    parser = _parser()
    arguments = parser.parse_args(given)
    _check(parser, arguments)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.deployment", description=_DESCRIPTION)
    parser.add_argument("--workers", type=int, default=None,
                        help=f"workers that do whole requests, each one device (default {WORKERS})")  # fmt: skip
    parser.add_argument("--shadow", action=argparse.BooleanOptionalAction, default=True,
                        help="memory service and shadow beside each engine (default), or cold restarts")  # fmt: skip
    parser.add_argument("--profile", default="default", help="compute profile: a name or a .toml file")
    parser.add_argument("--time-scale", type=float, default=1.0,
                        help="divide every emulated duration by this, and those of leases with them")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="the router's port (default: any free one)")
    parser.add_argument("--folder", default="", help="write events to FOLDER/parts and output to FOLDER/logs")
    parser.add_argument("--run-dir", default="", help="private folder for locks and sockets, with a short path")
    parser.add_argument("--weights-dir", default="", help="where made weights are kept")
    parser.add_argument("--probe-silent-s", type=float, default=ProbeLimits().silent_s,
                        help="kill an engine that is silent for this long")  # fmt: skip
    parser.add_argument("--announce", action="store_true", help="print one JSON line when everything serves")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input does")
    parser.add_argument("--blocks", action="store_true",
                        help="a block-group service (gRPC) beside each worker's engines")  # fmt: skip
    parser.add_argument("--fail-points", action="store_true",
                        help="with --blocks: let those services be made to fail at named places")  # fmt: skip
    parser.add_argument("--migration-mib-per-s", type=float, default=0.0,
                        help="with --blocks: what a tenant may move to a node (default: no limit)")  # fmt: skip
    _add_split(parser.add_argument_group("prefill and decode apart"))
    return parser


def _add_split(group: argparse._ArgumentGroup) -> None:
    """Add what is said of workers that do one part of a request each, and of the KV that moves between them."""
    terms = KvTerms()
    scaled_too = "; divided by --time-scale"
    group.add_argument(
        "--prefill", type=int, default=0, help="workers that prefill; with --decode, in place of --workers"
    )
    group.add_argument("--decode", type=int, default=0, help="workers that decode")
    group.add_argument("--kv-lease-duration", type=float, default=terms.kv_lease_duration,
                       help=f"seconds that prefilled KV is kept unless a heartbeat comes{scaled_too}")  # fmt: skip
    group.add_argument("--design", choices=[str(d) for d in LeaseDesign], default=str(terms.design),
                       help="how a prefill worker decides that nobody will read its blocks any more")  # fmt: skip
    group.add_argument("--single-timeout", type=float, default=terms.single_timeout,
                       help=f"seconds that the design of this name keeps blocks{scaled_too}")  # fmt: skip
    group.add_argument("--bidirectional", action="store_true",
                       help="two turns: a decode worker keeps its blocks for the next turn's prefill")  # fmt: skip
    group.add_argument("--decoder-kv-blocks-ttl", type=float, default=terms.decoder_kv_blocks_ttl,
                       help=f"seconds that it keeps them{scaled_too}")  # fmt: skip
    group.add_argument("--kv-load-failure-policy", choices=[str(p) for p in LoadPolicy],
                       default=str(terms.kv_load_failure_policy),
                       help="what becomes of a request whose KV cannot be loaded")  # fmt: skip
    group.add_argument("--no-clock-correction", action="store_true",
                       help="compare peers' deadlines uncorrected, to show what happens then")  # fmt: skip
    group.add_argument("--prefill-ranks", type=int, choices=RANKS, default=1,
                       help="processes that share out each block of a prefill worker")  # fmt: skip
    group.add_argument("--decode-ranks", type=int, choices=RANKS, default=1, help="the same of a decode worker")
    group.add_argument("--decode-slots", type=int, default=0,
                       help="requests that a decode worker runs at once (default: as the profile says)")  # fmt: skip
    group.add_argument("--decode-clock-offset-s", type=float, default=0.0,
                       help="put the decode workers' monotonic clock this far ahead of the prefill workers' (below 0: "
                       "behind), in a Linux time namespace")  # fmt: skip


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with one clear line and exit code 2 for options that make no sense. Fills in `workers` and `terms`."""
    least_s = 4 * ProbeLimits().interval_s
    if arguments.probe_silent_s < least_s:
        parser.error(f"--probe-silent-s must be at least {least_s:g}, got {arguments.probe_silent_s}")
    if not 0 < arguments.time_scale < math.inf:
        parser.error(f"--time-scale must be above 0, got {arguments.time_scale}")
    if min(arguments.prefill, arguments.decode) < 0 or (arguments.prefill == 0) != (arguments.decode == 0):
        parser.error(f"--prefill and --decode must both be at least 1, got {arguments.prefill} and {arguments.decode}")
    apart = arguments.prefill > 0
    if apart and arguments.workers is not None:
        parser.error("--workers cannot be given beside --prefill and --decode")
    if not apart and arguments.workers is None:
        arguments.workers = WORKERS
    if not apart and arguments.workers < 1:
        parser.error(f"--workers must be at least 1, got {arguments.workers}")
    arguments.workers = arguments.workers or 0
    if arguments.decode_slots < 0 or (arguments.decode_slots and not apart):
        parser.error(
            f"--decode-slots must be at least 0, and needs --prefill and --decode; got {arguments.decode_slots}"
        )
    if not 0 <= arguments.migration_mib_per_s < math.inf:
        parser.error(f"--migration-mib-per-s must be at least 0, got {arguments.migration_mib_per_s}")
    if arguments.fail_points and not arguments.blocks:
        parser.error("--fail-points needs --blocks: they are those of the block services")
    if arguments.decode_clock_offset_s and not apart:
        parser.error("--decode-clock-offset-s needs --prefill and --decode")
    if not abs(arguments.decode_clock_offset_s) <= OFFSET_MAX_S:
        parser.error(f"--decode-clock-offset-s must be within {OFFSET_MAX_S:g}, got {arguments.decode_clock_offset_s}")
    try:
        arguments.terms = scaled(
            KvTerms(
                design=LeaseDesign(arguments.design),
                kv_lease_duration=arguments.kv_lease_duration,
                single_timeout=arguments.single_timeout,
                bidirectional_kv_xfer=arguments.bidirectional,
                decoder_kv_blocks_ttl=arguments.decoder_kv_blocks_ttl,
                kv_load_failure_policy=LoadPolicy(arguments.kv_load_failure_policy),
                clock_correction=not arguments.no_clock_correction,
            ),
            arguments.time_scale,
        )
    except ValueError as error:
        parser.error("--" + str(error).replace("_", "-"))


REAL_WORK_S: Final = 1.0


def scaled(terms: KvTerms, time_scale: float) -> KvTerms:
    """Return the terms with every duration divided, as the emulated durations that they are to be compared with.

    The limits of reads and loads are not divided below `REAL_WORK_S`: what they bound is real. Raises ValueError if a
    duration becomes too short.
    """
    divided = {name: getattr(terms, name) / time_scale for name in DURATIONS}
    limits = {name: max(divided[name], min(getattr(terms, name), REAL_WORK_S)) for name in ("read_limit", "load_limit")}
    return msgspec.structs.replace(terms, **divided | limits)
