"""The model's folder for mockers: nothing that they do not load, and an end that no answer reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.targets.dynamo.model import mocker_model


def folder(path: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_weights_stay_where_they_are(tmp_path: Path) -> None:
    made = mocker_model(folder(tmp_path / "model", {"vocab_size": 10}), tmp_path / "made")
    assert sorted(p.name for p in made.iterdir()) == ["config.json", "generation_config.json", "tokenizer.json"]
    assert json.loads((made / "config.json").read_text()) == {"vocab_size": 10}


@pytest.mark.parametrize(
    ("config", "generation", "end"),
    [
        ({"vocab_size": 10, "eos_token_id": None}, {"do_sample": False}, 10),
        ({"vocab_size": 10}, None, 10),
        ({"vocab_size": 10, "eos_token_id": 2}, {"eos_token_id": 3}, 3),
        ({"vocab_size": 10, "eos_token_id": 2}, {}, None),
    ],
)
def test_a_model_without_an_end_gets_one_beyond_its_vocabulary(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None, end: int | None
) -> None:
    made = mocker_model(folder(tmp_path / "model", config, generation), tmp_path / "made")
    said = json.loads((made / "generation_config.json").read_text())
    assert said.get("eos_token_id") == end
    assert said.get("do_sample") == (generation or {}).get("do_sample")


def test_what_is_no_models_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json: No such file or directory"):
        mocker_model(tmp_path, tmp_path / "made")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInput, match=r"config\.json: no JSON object"):
        mocker_model(tmp_path, tmp_path / "made")
