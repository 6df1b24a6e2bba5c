"""Real vLLM servers on weights of one memory service: what they share, what vLLM copies, and who survives whom."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from reference_impl.memory_service.shared_weights import Role
from reference_impl.memory_service.vllm_loader import REPORT_VARIABLE, SOCKET_VARIABLE
from reference_impl.memory_service.weights_report import WeightsReport, Where, mapped_pages, read_reports
from tests.memory_service.running import RunningService, running_service
from tests.vllm.model_folder import make_model, weights_bytes
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]
INTERPRETER: Final = "PDPROOF_VLLM_PYTHON"
START_S: Final = 180.0
PROMPTS: Final = ([5, 77, 1000, 2050, 3, 9, 411], list(range(2, 600)), [4095] * 40)
TOLERANCE: Final = 1e-3
"""Of a logprob: a plain product and oneDNN's add in another order."""
MAPPED: Final = ("--model-loader-extra-config", '{"linears": "mapped"}')


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class Server:
    """A vLLM server of its own process group, on one core."""

    def __init__(self, folder: Path, name: str, core: int, environment: dict[str, str], *options: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        with self.log.open("wb") as log:  # not in the repository's folder: its egg-info would hide the entry points
            self.process = subprocess.Popen(
                [
                    *(
                        os.environ[INTERPRETER],
                        "-m",
                        "vllm.entrypoints.openai.api_server",
                        "--model",
                        str(folder / "model"),
                    ),
                    *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
                    *("--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching", *options),
                ],
                cwd=folder,
                env=os.environ | settings | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.sched_setaffinity(self.process.pid, {core})

    def wait_until_it_serves(self) -> None:
        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
            return False

        until(serves, START_S, f"{self.log.stem} serves")

    def answers(self) -> list[Answer]:
        return [self._ask(prompt) for prompt in PROMPTS]

    def _ask(self, prompt: list[int]) -> Answer:
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1}
        body |= {"return_token_ids": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            choice = json.load(response)["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class Seen(NamedTuple):
    """What a walk through four servers showed: an ordinary one, a writer, a reader after it, and one that maps all."""

    ordinary: list[Answer]
    writer: list[Answer]
    reader: list[Answer]
    reader_alone: list[Answer]
    mapped: list[Answer]
    reports: list[WeightsReport]
    pages_proportional: int
    pages_resident: int
    pages_written: int
    without_socket: str


@contextmanager
def servers() -> Iterator[list[Server]]:
    """Collect servers, and end them all."""
    running: list[Server] = []
    try:
        yield running
    finally:
        for server in running:
            server.kill()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two vLLM servers need two cores")
    folder = tmp_path_factory.mktemp("weights")
    make_model(folder / "model")
    with running_service() as service, servers() as running:
        yield _walk(folder, service, running, cores)


def _walk(folder: Path, service: RunningService, running: list[Server], cores: list[int]) -> Seen:
    report = folder / "report"
    ours = {SOCKET_VARIABLE: str(service.path), REPORT_VARIABLE: str(report)}

    def start(name: str, core: int, environment: dict[str, str], *options: str) -> Server:
        running.append(Server(folder, name, core, environment, *options))
        return running[-1]

    writer = start("writer", cores[0], ours, "--load-format", "pdproof")
    ordinary = start("ordinary", cores[1], {}, "--load-format", "safetensors")
    for server in (writer, ordinary):
        server.wait_until_it_serves()
    expected, from_writer = ordinary.answers(), writer.answers()
    ordinary.kill()
    reader = start("reader", cores[1], ours, "--load-format", "pdproof")
    reader.wait_until_it_serves()
    from_reader = reader.answers()
    writer.kill()
    alone = reader.answers()
    without = start("without", cores[1], {SOCKET_VARIABLE: ""}, "--load-format", "pdproof")
    mapped = start("mapped", cores[0], ours, "--load-format", "pdproof", *MAPPED)
    mapped.wait_until_it_serves()
    from_mapped = mapped.answers()
    without.process.wait(START_S)
    reports = read_reports(report)
    pages = [mapped_pages(told.pid) for told in reports[1:]]
    return Seen(
        expected,
        from_writer,
        from_reader,
        alone,
        from_mapped,
        reports,
        sum(found.proportional_bytes for found in pages),
        sum(found.resident_bytes for found in pages),
        sum(found.written_bytes for found in pages),
        without.log.read_text(),
    )


def agree(found: list[Answer], expected: list[Answer]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


def test_answers_are_those_of_the_ordinary_loader(seen: Seen) -> None:
    assert len({tuple(answer.tokens) for answer in seen.ordinary}) == len(PROMPTS)
    for found in (seen.writer, seen.reader, seen.mapped):
        agree(found, seen.ordinary)


def test_weights_outlive_the_server_that_loaded_them(seen: Seen) -> None:
    agree(seen.reader_alone, seen.ordinary)


def test_one_server_loads_and_the_others_read(seen: Seen) -> None:
    assert [report.role for report in seen.reports] == [Role.WRITER, Role.READER, Role.READER]
    assert len({(report.service, report.generation, report.layout) for report in seen.reports}) == 1


def test_what_vllm_packs_is_told_and_takes_private_memory(seen: Seen) -> None:
    """oneDNN gets a copy of each matrix: of linears the shared pages are let go, of embeddings there are both."""
    packed = seen.reports[1]
    places = {parameter.name: parameter.where for parameter in packed.parameters}
    assert places["model.layers.0.self_attn.qkv_proj.weight"] is Where.PACKED
    assert places["model.embed_tokens.weight"] is places["lm_head.weight"] is Where.BOTH
    assert places["model.norm.weight"] is Where.SHARED
    assert packed.bytes_shared + packed.bytes_copied == packed.bytes_total
    assert packed.bytes_total == pytest.approx(weights_bytes(), abs=4096)  # and vLLM's scales of the KV cache
    copies = packed.bytes_copied + packed.bytes_duplicated
    assert copies * 0.95 < packed.private_growth_bytes < copies * 1.2


def test_matrices_that_are_multiplied_where_they_stand_are_all_shared(seen: Seen) -> None:
    mapped = seen.reports[2]
    assert mapped.linears == "mapped"
    assert mapped.bytes_shared == weights_bytes()
    assert mapped.bytes_duplicated == 0
    assert mapped.bytes_copied < 4096
    assert mapped.private_growth_bytes < weights_bytes() / 10


def test_two_servers_map_the_same_pages_and_write_to_none(seen: Seen) -> None:
    """As the kernel sees it, after both have answered."""
    assert seen.pages_resident >= 2 * weights_bytes()
    assert seen.pages_proportional <= 1.05 * seen.pages_resident / 2
    assert seen.pages_written == 0


def test_without_a_socket_the_load_format_says_so(seen: Seen) -> None:
    lines = [line for line in seen.without_socket.splitlines() if "WeightsRefused: " in line]
    assert any(f"--load-format pdproof needs {SOCKET_VARIABLE}" in line for line in lines)


_ODD_MODEL = """
import sys
from pathlib import Path
import torch
from reference_impl.memory_service import torch_weights
from reference_impl.memory_service.shared_weights import attach_or_write
from reference_impl.memory_service.weights_report import mapped_pages
from reference_impl.memory_service.weights_table import check_same, place

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 4)
        self.tied = torch.nn.Linear(6, 4, bias=False)
        self.tied.weight = self.first.weight
        self.turned = torch.nn.Parameter(torch.zeros(3, 5).t(), requires_grad=False)
        self.small = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

def odd(value):
    model = Odd()
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + value)
    return model

def share(model):
    mine = torch_weights.shapes_of(model)
    shared = attach_or_write(
        Path(sys.argv[1]), "odd", lambda: place("odd", "id", mine), lambda *at: torch_weights.move_in(model, *at)
    )
    check_same(shared.table, "odd", "id", mine, "s")
    if shared.role == "reader":
        torch_weights.look_at(model, shared.address, shared.table)
    return shared

first, second = odd(1), odd(2)
one, other = share(first), share(second)
want = odd(1)
for model in (first, second):
    assert model.tied.weight is model.first.weight
    for name, tensor in want.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert model.turned.stride() == want.turned.stride()
assert torch.equal(second.scratch, odd(2).scratch)
second.first.bias.data.zero_()
assert torch.equal(first.first.bias, want.first.bias)
second.kept.zero_()
assert torch.equal(first.kept, want.kept)
places = {p.name: p.where.value for p in torch_weights.places_of(second, other.address, other.table)}
assert places.pop("kept") == places.pop("empty") == "private" and set(places.values()) == {"shared"}, places
assert mapped_pages().written_bytes == 4096
print("as it should be")
"""


def test_tied_turned_and_empty_tensors_and_buffers_come_out_as_they_went_in() -> None:
    with running_service() as service:
        done = subprocess.run(
            [os.environ[INTERPRETER], "-c", _ODD_MODEL, str(service.path)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.stdout == "as it should be\n", done.stderr[-2000:]
