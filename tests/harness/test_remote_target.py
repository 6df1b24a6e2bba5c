"""Servers that somebody else runs: their file is read strictly, and what cannot be asked of them is said."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from harness.cases.terms import Need, PairTerms
from harness.errors import BadInput
from harness.golden import TOLERANCE
from harness.targets.remote import DECODE, PREFILL, KnownTerms, RemoteConfig, RemotePair, load_remote

WHOLE = """
name = "staging"
prefill_url = "http://p.example:8000/"
decode_url = "https://d.example"
model = "canary"
router_url = "http://router.example:8080"
prefill_metrics_url = "http://p.example:8000/metrics"
decode_metrics_url = "https://d.example/metrics"
api_key_variable = "STAGING_KEY"

[terms]
lease_s = 6
load_failure_policy = "recompute"
bidirectional = false

[content]
logprob_tolerance = 0.2
"""


def config(**changes: object) -> RemoteConfig:
    fields = {"name": "here", "prefill_url": "http://p", "decode_url": "http://d", "model": "canary"}
    return msgspec.convert(fields | changes, RemoteConfig)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "staging.toml"
    path.write_text(WHOLE)
    pair = RemotePair(load_remote(path))
    assert pair.url_of(PREFILL) == "http://p.example:8000"
    assert pair.url_of(DECODE) == "https://d.example"
    assert pair.metrics_url(DECODE) == "https://d.example/metrics"
    assert pair.config.terms == KnownTerms(lease_s=6, load_failure_policy="recompute", bidirectional=False)
    assert pair.config.content.logprob_tolerance == 0.2
    assert config().content.logprob_tolerance == TOLERANCE


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "staging"', "", "missing required field `name`"),
        ('name = "staging"', 'name = "a b"', "name"),
        ('"http://p.example:8000/"', '"p.example:8000"', "prefill_url: must be http"),
        ('"http://p.example:8000/"', '""', "prefill_url: must be http"),
        ('"https://d.example"\n', '"https://d.example/v1"\n', "decode_url: is the server's root, without /v1"),
        ('"https://d.example"\n', '"https://me:secret@d.example"\n', "decode_url: holds a password"),
        ('"https://d.example"\n', '"https://d.example:70000"\n', "decode_url: Port out of range"),
        ('"http://router.example:8080"', '"http://router.example?x=1"', "router_url: must end with its path"),
        ('"STAGING_KEY"', '"sk-123"', "api_key_variable"),
        ("lease_s = 6", "lease_s = 0", "terms.lease_s"),
        ('"recompute"', '"retry"', "terms.load_failure_policy"),
        ("lease_s = 6", "leases = 6", "unknown field `leases`"),
        ("= 0.2", "= 0", "content.logprob_tolerance"),
        ("= 0.2", "= 10.1", "content.logprob_tolerance"),
        ("= 0.2", "= inf", "content.logprob_tolerance"),
        ("= 0.2", "= nan", "content.logprob_tolerance"),
        ("logprob_tolerance", "tolerance", "unknown field `tolerance`"),
        ("[terms]", "[terms", "staging.toml"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert WHOLE.count(old) == 1
    path = tmp_path / "staging.toml"
    path.write_text(WHOLE.replace(old, new))
    with pytest.raises(BadInput) as refused:
        load_remote(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_remote(tmp_path / "none.toml")
    with pytest.raises(BadInput, match=r"must be a \.toml file"):
        load_remote(Path("reference"))


def test_what_it_cannot_do_is_said_in_one_sentence_each() -> None:
    bare = RemotePair(config())
    assert bare.offers() == set()
    assert set(bare.lacks()) == set(Need)
    assert all(" " in why and "\n" not in why for why in bare.lacks().values())
    with_metrics = RemotePair(config(prefill_metrics_url="http://p/metrics", decode_metrics_url="http://d/metrics"))
    assert with_metrics.offers() == {Need.METRICS}
    assert Need.METRICS in RemotePair(config(prefill_metrics_url="http://p/metrics")).lacks()


def test_it_has_neither_processes_nor_logs() -> None:
    pair = RemotePair(config())
    assert pair.parts_of(PREFILL, ("engine_core", "worker")) == []
    assert pair.process_of(DECODE, "engine") is None
    assert pair.logs() == []
    assert pair.events(0, 2**63) == []


def test_a_case_runs_only_on_terms_that_are_known_to_be_its_own() -> None:
    wanted = PairTerms(lease_s=6, load_failure_policy="recompute")
    known = {"lease_s": 6, "load_failure_policy": "recompute", "bidirectional": False}
    assert RemotePair(config(terms=known)).misfit(wanted) is None
    assert "lease_s is 30" in (RemotePair(config(terms=known | {"lease_s": 30})).misfit(wanted) or "")
    assert "lease_s is not known" in (RemotePair(config()).misfit(wanted) or "")
    two_turns = msgspec.structs.replace(wanted, bidirectional=True, ttl_s=20)
    both = known | {"bidirectional": True}
    assert "ttl_s is not known" in (RemotePair(config(terms=both)).misfit(two_turns) or "")
    assert RemotePair(config(terms=both | {"ttl_s": 20})).misfit(two_turns) is None


def test_the_key_comes_from_the_environment_and_stands_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = RemotePair(config(api_key_variable="SOME_KEY"))
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(BadInput, match="SOME_KEY holds no key"):
        pair.headers()
    monkeypatch.setenv("SOME_KEY", "k-1")
    assert pair.headers() == {"Authorization": "Bearer k-1"}
    assert b"k-1" not in msgspec.json.encode(pair.config)
    assert RemotePair(config()).headers() == {}


@contextlib.asynccontextmanager
async def server(model: str = "canary", key: str = "") -> AsyncIterator[str]:
    async def models(request: web.Request) -> web.Response:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "no"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 2\n")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_servers_are_asked_whether_they_serve_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k-1")
    async with server() as p, server("another") as other, server(key="k-1") as locked, aiohttp.ClientSession() as asks:
        pair = RemotePair(config(prefill_url=p, decode_url=other))
        assert await pair.serves(asks, PREFILL)
        assert not await pair.serves(asks, DECODE)
        with pytest.raises(BadInput, match=f"{other}/v1/models did not name the model canary"):
            await pair.until_serves(0.1)
        assert not await RemotePair(config(prefill_url=locked)).serves(asks, PREFILL)
        pair = RemotePair(config(prefill_url=locked, decode_url=p, api_key_variable="SOME_KEY"))
        await pair.until_serves(5.0)


async def test_metrics_are_what_the_server_says_or_nothing() -> None:
    async with server() as p, aiohttp.ClientSession() as asks:
        pair = RemotePair(config(prefill_url=p, prefill_metrics_url=f"{p}/metrics", decode_metrics_url=f"{p}/none"))
        assert await pair.metrics_text(asks, PREFILL) == "vllm:num_requests_running 2\n"
        assert await pair.metrics_text(asks, DECODE) is None
        assert await RemotePair(config()).metrics_text(asks, PREFILL) is None


async def test_a_server_that_is_away_does_not_serve() -> None:
    async with aiohttp.ClientSession() as asks:
        assert not await RemotePair(config(prefill_url="http://127.0.0.1:9")).serves(asks, PREFILL)
