"""Weights on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reference_impl.content import weight_words
from reference_impl.engine.weights_file import WeightsError, ensure_weights, load_weights

SIZE = 2**20


def test_weights_are_made_once_and_load_as_the_oracle_knows_them(tmp_path: Path) -> None:
    path = ensure_weights(tmp_path, 3, SIZE)
    stamp = path.stat().st_mtime_ns
    assert ensure_weights(tmp_path, 3, SIZE) == path
    assert path.stat().st_mtime_ns == stamp
    target = np.zeros(SIZE // 8, np.uint64)
    load_weights(path, target)
    assert (target == weight_words(3, 0, SIZE // 8)).all()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def lose_sidecar(path: Path) -> None:
    path.with_suffix(".json").unlink()


@pytest.mark.parametrize(("damage", "words"), [(flip, "checksum"), (cut, "ends after"), (lose_sidecar, "made again")])
def test_damage_is_noticed(tmp_path: Path, damage: object, words: str) -> None:
    path = ensure_weights(tmp_path, 3, SIZE)
    damage(path)  # type: ignore[operator]
    with pytest.raises(WeightsError, match=words) as caught:
        load_weights(path, np.zeros(SIZE // 8, np.uint64))
    assert str(path) in str(caught.value)


def test_a_folder_that_takes_nothing_gives_one_clear_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(WeightsError, match="PDPROOF_CACHE"):
        ensure_weights(blocked / "below", 3, SIZE)
