"""Weights for a foreign engine: who writes, who attaches, what is refused. vLLM itself is in tests/vllm."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reference_impl.memory_service import vllm_loader
from reference_impl.memory_service.errors import LayoutChanged, ServiceGone, TooLarge
from reference_impl.memory_service.shared_weights import ALLOCATION, Role, SharedWeights, attach_or_write
from reference_impl.memory_service.weights_report import (
    MappedPages,
    Parameter,
    WeightsReport,
    Where,
    append,
    bytes_in,
    mapped_pages,
    read_reports,
)
from reference_impl.memory_service.weights_table import (
    Shape,
    WeightsRefused,
    WeightsTable,
    check_same,
    decode,
    identity_of,
    place,
)
from reference_impl.rules.sessions import METADATA_BYTES_MAX, Mode
from tests.memory_service.running import MIB, RunningService, end, reached, read_line, running_service, sigkill
from tests.waiting import until

WORDS = MIB
EMBEDDING = Shape("embedding", "float32", (1024, 1024), (1024, 1), 4 * MIB)
NORM = Shape("norm", "float32", (3,), (1,), 12)
HEAD = Shape("head", "float32", (7, 5), (5, 1), 140)
TABLE = place("toy", "id", [EMBEDDING, NORM, HEAD])


def words(shared: SharedWeights) -> NDArray[np.uint32]:
    raw = (ctypes.c_uint32 * WORDS).from_address(shared.address)
    return np.frombuffer(raw, "u4")


def fill(address: int, table: WeightsTable) -> None:
    assert table == TABLE
    np.frombuffer((ctypes.c_uint32 * WORDS).from_address(address), "u4")[:] = np.arange(WORDS)


def never() -> WeightsTable:
    raise AssertionError("loaded again")


def share(service: RunningService, load: Callable[[], WeightsTable] = lambda: TABLE) -> SharedWeights:
    return attach_or_write(service.path, "e", load, fill)


def test_the_first_engine_writes_and_the_next_one_reads_without_loading(service: RunningService) -> None:
    with closing(share(service)) as first, closing(share(service, never)) as second:
        assert (first.role, second.role) == (Role.WRITER, Role.READER)
        assert first.layout == second.layout
        assert second.table == TABLE
        for shared in (first, second):
            assert np.array_equal(words(shared), np.arange(WORDS))
            shared.check_current()
        assert service.figures().used_bytes == -(-TABLE.size_bytes // 4096) * 4096


@pytest.mark.parametrize("who", [0, 1])
def test_what_an_engine_writes_to_its_weights_no_other_one_sees(service: RunningService, who: int) -> None:
    with closing(share(service)) as first, closing(share(service, never)) as second:
        before = mapped_pages()
        assert before.written_bytes == 0
        words((first, second)[who])[5:7] = 9
        assert words((first, second)[who])[5] == 9
        assert words((second, first)[who])[5] == 5
        with closing(share(service, never)) as third:
            assert words(third)[5] == 5
        assert mapped_pages().written_bytes == 4096


def test_pages_are_shared_and_not_copied(service: RunningService) -> None:
    with closing(share(service)), closing(share(service, never)):
        pages = mapped_pages()
        assert pages.resident_bytes >= 2 * 4 * MIB
        assert pages.proportional_bytes <= 1.1 * pages.resident_bytes / 2


def test_nobody_can_write_to_what_was_committed(service: RunningService) -> None:
    with closing(share(service)) as first:
        descriptor = first.client.export(ALLOCATION)
        try:
            with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                os.write(descriptor, b"x")
        finally:
            os.close(descriptor)
        assert first.client.mode is Mode.READER


# Attaches or writes; a writer that is told to stands still in the middle of it.
_ENGINE = """
import sys
from pathlib import Path
from tests.memory_service import test_vllm_loader as here
from reference_impl.memory_service.shared_weights import attach_or_write
path, hang = sys.argv[1:]
def load():
    print("loading", flush=True)
    if hang == "hang":
        sys.stdin.read()
    return here.TABLE
shared = attach_or_write(Path(path), "child", load, here.fill)
print(shared.role.value, int(here.words(shared).sum(dtype="u8")), flush=True)
sys.stdin.read()
"""
_SUM = WORDS * (WORDS - 1) // 2


@contextmanager
def foreign_engine(service: RunningService, hang: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(service.path), hang],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        end(process)


def test_weights_outlive_the_engine_that_wrote_them(service: RunningService) -> None:
    with foreign_engine(service) as writer:
        reached(writer, f"writer {_SUM}")
        with closing(share(service, never)) as reader:
            sigkill(writer)
            until(lambda: service.figures().sessions == 1, 10, "the service has seen the writer's end")
            assert int(words(reader).sum(dtype="u8")) == _SUM
            reader.check_current()
    with closing(share(service, never)) as later:
        assert int(words(later).sum(dtype="u8")) == _SUM


def test_the_next_engine_writes_when_the_one_that_loads_dies(service: RunningService) -> None:
    with foreign_engine(service, "hang") as first:
        reached(first, "loading")
        with foreign_engine(service) as second:
            # Nothing tells that it waits; whether it does or comes after the death, it must write.
            sigkill(first)
            assert read_line(second) == "loading"
            assert read_line(second) == f"writer {_SUM}"


def test_engines_that_start_together_load_once(service: RunningService) -> None:
    with foreign_engine(service) as first, foreign_engine(service) as second, foreign_engine(service) as third:
        said = []
        for process in (first, second, third):
            while not (line := read_line(process)).endswith(str(_SUM)):
                said.append(line)
            said.append(line)
    assert sorted(said) == ["loading", f"reader {_SUM}", f"reader {_SUM}", f"writer {_SUM}"]


def test_a_load_that_fails_leaves_nothing_behind(service: RunningService) -> None:
    with pytest.raises(AssertionError, match="loaded again"):
        share(service, never)
    assert service.settled().used_bytes == 0
    with closing(share(service)) as next_one:
        assert next_one.role is Role.WRITER


def test_weights_that_were_replaced_are_refused(service: RunningService) -> None:
    with closing(share(service)) as first:
        with service.client() as other:
            other.allocate("w", 4096)
            other.commit()
        with pytest.raises(LayoutChanged, match="generation 2"):
            first.check_current()


@pytest.mark.parametrize("metadata", [b"", b"meta", TABLE.encode()])
def test_what_another_program_put_there_is_refused(service: RunningService, metadata: bytes) -> None:
    with service.client() as other:
        other.allocate(ALLOCATION, 4096)
        other.commit(metadata)
    with pytest.raises(WeightsRefused, match=f"{service.path} holds weights"):
        share(service, never)
    assert service.settled(sessions=0).sessions == 0


def test_a_device_without_room_is_told_of_and_the_next_is_not_hindered() -> None:
    with running_service(capacity_bytes=MIB) as service:
        with pytest.raises(TooLarge, match="needs 4198400 bytes"):
            share(service)
        assert service.settled().used_bytes == 0


def test_no_service_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceGone, match="no memory service answers") as caught:
        attach_or_write(tmp_path / "none", "e", never, fill)
    assert "\n" not in str(caught.value)


def test_tensors_stand_one_after_the_other_on_cache_lines() -> None:
    assert [placed.offset for placed in TABLE.tensors] == [0, 4 * MIB, 4 * MIB + 64]
    assert TABLE.size_bytes == 4 * MIB + 64 + 140
    assert decode(TABLE.encode(), "s") == TABLE


def test_a_table_that_a_layout_cannot_hold_is_refused() -> None:
    many = [Shape("x" * 200 + str(number), "float32", (1,), (1,), 4) for number in range(METADATA_BYTES_MAX // 200)]
    with pytest.raises(WeightsRefused, match="use another load format"):
        place("toy", "id", many).encode()


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(WeightsRefused, match="nothing to share"):
        place("toy", "id", [])


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ([EMBEDDING, NORM], "'head' of toy as float32 .*this engine has nothing"),
        ([EMBEDDING, NORM, HEAD, Shape("more", "float32", (1,), (1,), 4)], "'more' of toy as nothing"),
        ([EMBEDDING, NORM, Shape("head", "float32", (5, 7), (7, 1), 140)], r"\[7, 5\].*\[5, 7\]"),
        ([EMBEDDING, NORM, Shape("head", "int32", (7, 5), (5, 1), 140)], "int32"),
        ([EMBEDDING, NORM, Shape("head", "float32", (7, 5), (1, 7), 140)], r"strides \[1, 7\]"),
    ],
)
def test_another_layout_of_the_model_is_refused_by_the_tensors_name(mine: list[Shape], says: str) -> None:
    check_same(TABLE, "toy", "id", [HEAD, NORM, EMBEDDING], "s")
    with pytest.raises(WeightsRefused, match=says) as caught:
        check_same(TABLE, "toy", "id", mine, "s")
    assert "\n" not in str(caught.value)


def test_another_model_is_refused_by_name() -> None:
    with pytest.raises(WeightsRefused, match=r"holds the weights of toy .*not of other"):
        check_same(TABLE, "other", "another", [EMBEDDING, NORM, HEAD], "s")


def test_a_folders_identity_hangs_on_its_files_and_the_options(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1234")
    (tmp_path / "config.json").write_text("{}")
    first = identity_of(tmp_path, "float32")
    assert first == identity_of(tmp_path, "float32")
    assert first != identity_of(tmp_path, "bfloat16")
    os.utime(file, ns=(1, 1))
    assert first != identity_of(tmp_path, "float32")
    file.unlink()
    with pytest.raises(WeightsRefused, match=r"no folder with \*.safetensors"):
        identity_of(tmp_path)


REPORT = WeightsReport(
    pid=7,
    role=Role.READER,
    linears="packed",
    model="toy",
    service="s",
    generation=2,
    layout="abc",
    load_ns=5,
    bytes_total=100,
    bytes_shared=60,
    bytes_duplicated=50,
    bytes_copied=40,
    pages=MappedPages(100, 50, 0),
    private_growth_bytes=90,
    parameters=(Parameter("a", 50, Where.BOTH), Parameter("b", 10, Where.SHARED), Parameter("c", 40, Where.PACKED)),
)


def test_reports_are_lines_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "report"
    assert read_reports(path) == []
    append(REPORT, path)
    append(REPORT, path)
    with path.open("ab") as file:
        file.write(b'{"pid"')
    assert read_reports(path) == [REPORT, REPORT]
    assert bytes_in(REPORT.parameters, Where.SHARED, Where.BOTH) == 60
    assert "60 of 100 bytes lie in shared pages" in REPORT.summary()


def test_a_missing_socket_is_one_clear_line() -> None:
    with pytest.raises(WeightsRefused, match="--load-format pdproof needs PDPROOF_MEMORY_SOCKET") as caught:
        vllm_loader.memory_socket("")
    assert "\n" not in str(caught.value)
    assert vllm_loader.memory_socket("/run/s") == Path("/run/s")


def test_options_of_the_loader() -> None:
    assert vllm_loader.linears_option({}) == ("packed", {})
    assert vllm_loader.linears_option({"linears": "mapped", "num_threads": 2}) == ("mapped", {"num_threads": 2})
    for wrong in ({"linears": "fast"}, {"linears": None}, "mapped"):
        with pytest.raises(WeightsRefused, match="must be"):
            vllm_loader.linears_option(wrong)


def test_engines_that_this_cannot_serve_are_refused() -> None:
    vllm_loader.must_be_one_cpu("cpu", 1)
    with pytest.raises(WeightsRefused, match="'cuda'"):
        vllm_loader.must_be_one_cpu("cuda", 1)
    with pytest.raises(WeightsRefused, match="one rank, and this engine has 2"):
        vllm_loader.must_be_one_cpu("cpu", 2)


def test_vllm_is_not_needed_to_import_the_plugin() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; import reference_impl.memory_service.vllm_loader; print({'torch', 'vllm'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "set()"
