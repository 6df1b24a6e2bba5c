"""The command line of a deployment: what it means, and what it refuses before anything is started."""

from __future__ import annotations

import msgspec
import pytest

from reference_impl.deployment import DeploymentConfig, clock_offsets_s, places
from reference_impl.deployment_options import DURATIONS, parse
from reference_impl.engine.profile import load_profile
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms, LeaseDesign, LoadPolicy
from reference_impl.time_namespace import uptime_s

SPLIT = ["--prefill", "1", "--decode", "2"]


def config(tmp_path_of: pytest.TempPathFactory, **given: object) -> DeploymentConfig:
    folder = tmp_path_of.mktemp("deployment")
    return DeploymentConfig(
        profile=load_profile("tiny"), shadow=False, run_dir=folder, events_dir=folder, logs_dir=folder,
        weights_dir=folder, **given,  # type: ignore[arg-type]
    )  # fmt: skip


def test_by_default_two_workers_do_whole_requests() -> None:
    given = parse([])
    assert (given.workers, given.prefill, given.decode, given.terms) == (2, 0, 0, KvTerms())


def test_prefill_and_decode_take_the_place_of_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    given = parse([*SPLIT, "--prefill-ranks", "4", "--decode-ranks", "2"])
    assert (given.workers, given.prefill, given.decode) == (0, 1, 2)
    found = places(
        config(
            tmp_path_factory, prefill=1, decode=2, prefill_ranks=given.prefill_ranks, decode_ranks=given.decode_ranks
        )
    )
    assert [(p.worker_id, p.role, p.ranks) for p in found] == [
        ("p0", Role.PREFILL, 4), ("d0", Role.DECODE, 2), ("d1", Role.DECODE, 2),
    ]  # fmt: skip


def test_todays_workers_keep_their_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert [(p.worker_id, p.role) for p in places(config(tmp_path_factory, workers=2))] == [
        ("w0", Role.BOTH), ("w1", Role.BOTH),
    ]  # fmt: skip


def test_the_terms_are_told_and_their_durations_scaled() -> None:
    given = parse([
        *SPLIT, "--time-scale", "10", "--design", "single-timeout", "--single-timeout", "5", "--kv-lease-duration", "6",
        "--bidirectional", "--decoder-kv-blocks-ttl", "20", "--kv-load-failure-policy", "fail", "--no-clock-correction",
    ])  # fmt: skip
    assert given.terms == KvTerms(
        design=LeaseDesign.SINGLE_TIMEOUT, single_timeout=0.5, kv_lease_duration=0.6, bidirectional_kv_xfer=True,
        decoder_kv_blocks_ttl=2.0, kv_load_failure_policy=LoadPolicy.FAIL, read_limit=1.0, load_limit=6.0,
        clock_correction=False,
    )  # fmt: skip


def test_every_duration_is_scaled() -> None:
    seconds = {f.name for f in msgspec.structs.fields(KvTerms) if f.type is float}
    assert seconds == set(DURATIONS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--prefill", "1"], "--prefill and --decode must both be at least 1"),
        (["--decode", "1"], "--prefill and --decode must both be at least 1"),
        (["--prefill", "-1", "--decode", "-1"], "--prefill and --decode must both be at least 1"),
        ([*SPLIT, "--workers", "2"], "--workers cannot be given"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--decode-clock-offset-s", "5"], "--decode-clock-offset-s needs"),
        ([*SPLIT, "--decode-clock-offset-s", "nan"], "--decode-clock-offset-s must be within"),
        ([*SPLIT, "--kv-lease-duration", "0"], "--kv-lease-duration must be above 0"),
        ([*SPLIT, "--kv-lease-duration", "nan"], "--kv-lease-duration must be above 0"),
        ([*SPLIT, "--single-timeout", "-5"], "--single-timeout must be above 0"),
        ([*SPLIT, "--decoder-kv-blocks-ttl", "1e9"], "--decoder-kv-blocks-ttl must be above 0"),
        ([*SPLIT, "--decode-ranks", "3"], "--decode-ranks"),
        ([*SPLIT, "--design", "hope"], "--design"),
        ([*SPLIT, "--kv-load-failure-policy", "shrug"], "--kv-load-failure-policy"),
        (["--time-scale", "0"], "--time-scale must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("offset_s", [0.0, 5000.0, -1.0])
def test_the_decode_sides_clock_is_shifted_where_it_can_be(offset_s: float) -> None:
    assert clock_offsets_s(offset_s) == (0.0, offset_s)


def test_a_clock_that_would_stand_before_its_boot_puts_the_other_side_ahead() -> None:
    far_s = uptime_s() + 1000
    assert clock_offsets_s(-far_s) == (far_s, 0.0)
