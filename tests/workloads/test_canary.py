"""The canary: its answers depend on its prompts, and damage to any one block of its KV shows in them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from reference_impl import tokens
from workloads.canary.forward import Forward, KvCache, log_softmax
from workloads.canary.model import canary_folder, make_canary
from workloads.canary.oracle import TOLERANCE, CanaryOracle
from workloads.canary.spec import CANARY
from workloads.canary.weights import canary_weights
from workloads.prompts import prompt_tokens
from workloads.rows import Outcome, PromptSpec, RequestRecord

INPUT = 32_000
ANSWERED = 16
"""Tokens of the answer that damage must show in."""


def prompt(index: int, length: int = INPUT) -> NDArray[np.int64]:
    return prompt_tokens(PromptSpec(seed=11, index=index, input_tokens=length))


@pytest.fixture(scope="module")
def oracle() -> CanaryOracle:
    return CanaryOracle(CANARY)


class Sums:
    """Attention over a prompt, block by block, so that one block's part can be taken out and another put in."""

    def __init__(self, forward: Forward, asked: NDArray[np.int64], answered: NDArray[np.int64], block: int) -> None:
        self.forward = forward
        self.tokens = np.concatenate([asked, answered])[: len(asked) + len(answered) - 1]
        self.positions = np.arange(len(asked) - 1, len(self.tokens))
        self.last = self.tokens[self.positions]
        self.answered = answered
        self.block = block
        self.blocks = len(asked) // block
        self.queries = forward.queries(self.last, self.positions).astype(np.float64)
        self.cache = forward.cache(self.tokens)
        self.parts = [self.part(self.of(self.cache, b)) for b in range(self.blocks)]
        tail = [self.tail(q) for q in range(len(self.positions))]
        self.tops = sum(t for t, _ in self.parts) + np.array([t for t, _ in tail])
        self.totals = sum(s for _, s in self.parts) + np.array([s for _, s in tail])

    def of(self, cache: KvCache, block: int) -> KvCache:
        slots = slice(block * self.block, (block + 1) * self.block)
        return KvCache(cache.keys[slots], cache.values[slots])

    def part(self, kv: KvCache) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weighted sum of a block's values, and the sum of the weights, for every query."""
        weights = np.exp(self.queries @ kv.keys.T.astype(np.float64))
        return weights @ kv.values.astype(np.float64), weights.sum(axis=1)

    def tail(self, query: int) -> tuple[NDArray[np.float64], float]:
        slots = slice(self.blocks * self.block, int(self.positions[query]) + 1)
        weights = np.exp(self.queries[query] @ self.cache.keys[slots].T.astype(np.float64))
        return weights @ self.cache.values[slots].astype(np.float64), float(weights.sum())

    def logprobs(self, block: int | None = None, kv: KvCache | None = None) -> NDArray[np.float64]:
        """Return the answered tokens' logprobs, with one block's KV exchanged."""
        tops, totals = self.tops, self.totals
        if block is not None and kv is not None:
            top, total = self.part(kv)
            tops, totals = tops - self.parts[block][0] + top, totals - self.parts[block][1] + total
        behind = log_softmax(self.forward.behind(self.last, tops / totals[:, None]))
        return behind[np.arange(len(self.answered)), self.answered]


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize(("block", "step"), [(16, 7), (128, 1)])  # of the small ones every seventh: time
def test_damage_to_any_one_block_of_a_prompt_shows(oracle: CanaryOracle, block: int, step: int) -> None:
    asked, foreign = prompt(1), prompt(2)
    ids, told = oracle.answer(asked, ANSWERED)
    sums = Sums(Forward(CANARY), asked, np.array(ids), block)
    right = sums.logprobs()
    assert np.abs(right - told).max() < TOLERANCE / 10
    others = sums.forward.cache(foreign)
    least = dict.fromkeys(("zeros", "foreign", "keys", "values"), math.inf)
    for number in range(0, sums.blocks, step):
        own, other = sums.of(sums.cache, number), sums.of(others, number)
        damaged = {
            "zeros": KvCache(np.zeros_like(own.keys), np.zeros_like(own.values)),
            "foreign": other,
            "keys": KvCache(other.keys, own.values),
            "values": KvCache(own.keys, other.values),
        }
        for kind, kv in damaged.items():
            moved = np.abs(sums.logprobs(number, kv) - right).max()
            least[kind] = min(least[kind], float(moved))
    margin = {kind: value / TOLERANCE for kind, value in least.items()}
    assert min(margin.values()) > (60 if block == 128 else 12), margin


def test_answers_depend_on_the_prompt_and_do_not_run_in_a_circle(oracle: CanaryOracle) -> None:
    answers = [oracle.answer(prompt(index, 2_000), 200)[0] for index in range(4)]
    assert len({tuple(a[:8]) for a in answers}) == 4
    assert all(len(set(a)) > 30 for a in answers)


def test_a_right_answer_is_right_and_any_other_is_not(oracle: CanaryOracle) -> None:
    asked = prompt(3, 500)
    ids, logprobs = oracle.answer(asked, 40)
    assert oracle.judge(asked, ids, logprobs).right
    assert oracle.judge(asked, ids).right
    assert oracle.judge(asked, ids[:7], logprobs[:7]).right  # a broken stream, as far as it came
    assert oracle.judge(asked, []).right
    noisy = [p + TOLERANCE / 2 for p in logprobs]
    assert oracle.judge(asked, ids, noisy).right
    for number in (0, 17, 39):
        wrong = [*ids[:number], (ids[number] + 1) % 4096, *ids[number + 1 :]]
        assert oracle.judge(asked, wrong).first_bad == number
        lied = [*logprobs[:number], logprobs[number] - 2 * TOLERANCE, *logprobs[number + 1 :]]
        said = oracle.judge(asked, ids, lied)
        assert (said.right, said.first_bad) == (False, number)
        assert said.worst_error == pytest.approx(2 * TOLERANCE, rel=0.01)


@pytest.mark.parametrize("told", [[math.nan], [-1.0, -1.0], [math.inf]])
def test_probabilities_that_cannot_be_are_an_error(oracle: CanaryOracle, told: list[float]) -> None:
    asked = prompt(4, 100)
    ids, _ = oracle.answer(asked, 1)
    assert not oracle.judge(asked, ids, told).right


def test_tokens_that_cannot_be_are_an_error(oracle: CanaryOracle) -> None:
    asked = prompt(5, 100)
    assert not oracle.judge(asked, [4096]).right
    assert not oracle.judge(asked, [-1]).right
    assert not oracle.judge(asked, [1] * CANARY.max_positions).right


def test_records_are_judged_with_what_they_hold(oracle: CanaryOracle) -> None:
    spec = PromptSpec(seed=11, index=6, input_tokens=300)
    ids, logprobs = oracle.answer(prompt_tokens(spec), 5)
    record = RequestRecord(
        request_id="r", prompt=spec, max_tokens=5, intended_ns=1, sent_ns=1, send_began_ns=1, end_ns=2,
        outcome=Outcome.OK, output_ids=ids, logprobs=logprobs,
    )  # fmt: skip
    lied = msgspec.structs.replace(record, logprobs=[p - 1 for p in logprobs])
    assert oracle.are_right([prompt_tokens(spec)] * 2, [record, lied]) == [True, False]


def test_the_folder_is_made_once_whole_and_the_same_everywhere(tmp_path: Path) -> None:
    folder = make_canary(tmp_path / "one")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make_canary(folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    again = make_canary(tmp_path / "two")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}
    stored = load_file(folder / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in stored.items()} == {
        name: tensor.tolist() for name, tensor in canary_weights(CANARY).items()
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_other_tensors_have_another_folder() -> None:
    other = msgspec.structs.replace(CANARY, seed=CANARY.seed + 1)
    assert canary_folder() == canary_folder(CANARY)
    assert canary_folder(other) != canary_folder()
    assert canary_folder(msgspec.structs.replace(CANARY, max_positions=1024)) != canary_folder()


def test_every_token_reads_as_printable_text(tmp_path: Path) -> None:
    read = msgspec.json.decode((make_canary(tmp_path / "canary") / "tokenizer.json").read_bytes())
    vocabulary = read["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tokens.VOCABULARY))
    assert all(word.isprintable() for word in vocabulary)
