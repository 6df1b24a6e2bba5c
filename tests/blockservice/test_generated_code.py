"""The protobuf code that is committed is the one that blocks.proto makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = Path("reference_impl/blockservice/blocks.proto")
MADE = ("blocks_pb2.py", "blocks_pb2.pyi", "blocks_pb2_grpc.py")


def made_anew(folder: Path) -> dict[str, str]:
    """Return what `make proto` makes, file by file."""
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={folder}"),
            *(f"--pyi_out={folder}", f"--grpc_python_out={folder}", str(PROTO)),
        ],
        cwd=ROOT, check=True, timeout=60,
    )  # fmt: skip
    return {name: (folder / PROTO.parent / name).read_text() for name in MADE}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made_anew(tmp_path_factory.mktemp("proto"))


@pytest.mark.parametrize("name", MADE)
def test_what_is_committed_is_what_the_proto_makes(made: dict[str, str], name: str) -> None:
    assert (ROOT / PROTO.parent / name).read_text() == made[name], f"{name} is out of date: run `make proto`"


def test_make_proto_is_how_it_was_made() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\nproto:")[2].partition("\n\n")[0]
    assert "grpc_tools.protoc" in rule
    assert str(PROTO) in rule
