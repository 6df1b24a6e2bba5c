"""Compute profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_impl.engine.profile import ProfileError, load_profile, profile_names


def test_every_profile_that_ships_loads_and_says_what_it_emulates() -> None:
    assert {"default", "glm-5.2-b200", "tiny"} <= set(profile_names())
    for name in profile_names():
        assert load_profile(name).emulated()


def test_the_published_profile_has_the_published_times() -> None:
    profile = load_profile("glm-5.2-b200")
    assert sum(phase.seconds for phase in profile.init) == pytest.approx(283)
    assert (profile.detection_s, profile.promotion_s) == (1.7, 5.6)
    assert 1.0 < 32_000 / profile.prefill_tokens_per_s < 1.4  # one prefill, as published


def test_the_default_profile_emulates_no_part_of_a_start() -> None:
    profile = load_profile("default")
    assert not profile.init
    assert profile.detection_s == profile.promotion_s == 0


def test_scaling_divides_every_duration() -> None:
    profile, scaled = load_profile("glm-5.2-b200"), load_profile("glm-5.2-b200").scaled(20)
    assert scaled.step_s(3, 2048) == pytest.approx(profile.step_s(3, 2048) / 20)
    assert [p.seconds for p in scaled.init] == pytest.approx([p.seconds / 20 for p in profile.init])
    assert scaled.detection_s == pytest.approx(1.7 / 20)
    assert scaled.stream_interval_tokens == 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'x'", "missing required field"),
        ("name = 'x'\nprefill_tokens_per_s = 0\ndecode_base_s = 0\ndecode_per_request_s = 0", "must be positive"),
        ("name = 'x'\nprefill_tokens_per_s = 1\ndecode_base_s = -1\ndecode_per_request_s = 0", "must not be negative"),
        ("name = 'x'\nsurprise = 1\nprefill_tokens_per_s = 1\ndecode_base_s = 0\ndecode_per_request_s = 0", "surprise"),
        ("name = ", "Invalid value"),
    ],
)
def test_a_bad_profile_gets_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises(ProfileError, match=words) as caught:
        load_profile(str(file))
    assert str(file) in str(caught.value)


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"there are .*default"):
        load_profile("nope")
    with pytest.raises(ProfileError, match="no such file"):
        load_profile("nope.toml")
