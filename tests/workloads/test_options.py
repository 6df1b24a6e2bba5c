"""Options: each bad value is one clear line that names it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from workloads.options import (
    BadOption,
    LoadOptions,
    Options,
    PdOptions,
    SessionOptions,
    TraceOptions,
    add_options,
    from_namespace,
    shard_path,
)
from workloads.prompts import PromptFormat

SAMPLE = str(Path(__file__).parents[2] / "workloads/traces/sample.jsonl")


KINDS = [PdOptions, SessionOptions, TraceOptions]


def parsed_as(kind: type[Options], *arguments: str) -> Options:
    parser = argparse.ArgumentParser(prog="locust", usage="")
    add_options(parser, kind, "workloads/some.py")
    return from_namespace(parser.parse_args(arguments), kind)


def parsed(*arguments: str) -> PdOptions:
    return parsed_as(PdOptions, *arguments)


def test_the_defaults_are_the_published_load() -> None:
    options = parsed()
    assert options == PdOptions()
    assert (options.rate_per_s, options.input_tokens, options.output_tokens) == (0.7, 32_000, 1_000)
    assert options.format is PromptFormat.IDS
    assert parsed("--api", "chat").format is PromptFormat.TEXT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate-per-s", "0"], "--rate-per-s: must be a number above 0 and at most 100000, got '0'"),
        (["--rate-per-s", "nan"], "got 'nan'"),
        (["--rate-per-s", "fast"], "got 'fast'"),
        (["--input-tokens", "1.5"], "--input-tokens: must be a whole number at least 1"),
        (["--seed", "-3"], "--seed: must be a whole number at least 0"),
        (["--arrivals", "weekly"], "--arrivals: invalid choice: 'weekly'"),
        (["--rows", "/nowhere/rows.jsonl"], "--rows: /nowhere/rows.jsonl: no file can be made there"),
    ],
)
def test_a_bad_value_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api", "chat", "--prompt-format", "ids"], "--prompt-format ids needs --api completions"),
        (["--prefix-groups", "2"], "--prefix-groups and --prefix-tokens are given together"),
        (["--prefix-groups", "2", "--prefix-tokens", "33000"], "at most --input-tokens (32000), got 33000"),
    ],
)
def test_values_that_do_not_go_together_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(BadOption) as caught:
        parsed(*arguments)
    assert words in str(caught.value)


def test_what_the_web_form_sends_is_checked_as_well() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, SessionOptions, "workloads/multiturn.py")
    form = parser.parse_args([])
    form.rate_per_s = -1.0
    with pytest.raises(BadOption, match="--rate-per-s: must be a number above 0"):
        from_namespace(form, SessionOptions)
    form.rate_per_s, form.think_s = 1.0, "soon"
    with pytest.raises(BadOption, match=r"--think-s: each time .* must be a number"):
        from_namespace(form, SessionOptions)


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_of_the_load_names_every_option(kind: type[LoadOptions], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed_as(kind, "--help-load")
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split()).replace("--kv-handoff,", "--kv-handoff ")
    assert "workloads/some.py" in text
    for name in kind.__struct_fields__:
        assert f"--{name.replace('_', '-')} " in text
    assert "-u and -r are ignored" in text


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    with pytest.raises(SystemExit):
        parsed_as(TraceOptions, "--trace", str(path))
    assert f"--trace: trace {path}, line 1: Object missing required field `timestamp`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--think-s", "1,,2"], "--think-s: each time (they are split by commas) must be a number at least 0"),
        (["--think-s", "-1"], "got '-1'"),
        (["--turns", "0"], "--turns: must be a whole number at least 1"),
        (["--keep-alive-s", "often"], "--keep-alive-s: must be a number at least 0"),
        (["--requests", "3"], "unrecognized arguments: --requests 3"),
    ],
)
def test_a_bad_value_of_sessions_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed_as(SessionOptions, *arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (SessionOptions, ["--strict-openai"], "--strict-openai leaves out return_token_ids"),
        (SessionOptions, ["--no-kv-handoff", "--keep-alive-s", "3"], "--keep-alive-s renews hand-offs"),
        (TraceOptions, [], "name a trace with --trace FILE"),
    ],
)
def test_what_a_kind_of_load_cannot_do_is_refused(kind: type[LoadOptions], arguments: list[str], words: str) -> None:
    with pytest.raises(BadOption) as caught:
        parsed_as(kind, *arguments)
    assert words in str(caught.value)


def test_a_trace_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed_as(TraceOptions, "--trace", "/nowhere/t.jsonl")
    assert "--trace: cannot read /nowhere/t.jsonl: No such file" in capsys.readouterr().err
    assert parsed_as(TraceOptions, "--trace", SAMPLE, "--time-scale", "10").time_scale == 10


def test_think_times_are_a_list_or_one() -> None:
    assert parsed_as(SessionOptions).thinks_s == (5.0,)
    options = parsed_as(SessionOptions, "--think-s", "0.5,480", "--no-kv-handoff")
    assert options.thinks_s == (0.5, 480.0)
    assert not options.kv_handoff


def test_rows_are_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert parsed("--rows", str(path)).rows == str(path)
    path.write_text("something\n")
    with pytest.raises(SystemExit):
        parsed("--rows", str(path))
    assert "holds something already" in capsys.readouterr().err


@pytest.mark.parametrize(("start_s", "words"), [(-100, "is 100 s ago"), (4000, "is 4000 s ahead")])
def test_a_start_far_from_now_is_refused(start_s: int, words: str) -> None:
    now_ns = 10**15
    LoadOptions(start_at_ns=now_ns + 10**9).check_start(now_ns)
    with pytest.raises(BadOption, match=words):
        LoadOptions(start_at_ns=now_ns + start_s * 10**9).check_start(now_ns)


def test_each_shard_has_a_file_of_its_own() -> None:
    assert shard_path("a/rows.jsonl", 0, 1) == Path("a/rows.jsonl")
    assert shard_path("a/rows.jsonl", 1, 2) == Path("a/rows-1.jsonl")
