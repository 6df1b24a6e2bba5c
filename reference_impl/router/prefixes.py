"""Prefixes that another node holds: borrowed for a prefill, so that they are read and not computed once more.

The router knows groups from listings, a second old at most. If the worker that is to prefill holds less of a prompt
than another node, that node is asked for a loan (`PrepareGet`), and the loan's hand-off goes along with the request.
Whatever goes wrong with it, and whenever it takes longer than it may, the prompt is computed (KVC-IDEM-014); an engine
that finds the loan over when it comes for it computes as well.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from pathlib import Path
from typing import Final

import msgspec

from reference_impl import tokens
from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.client import BlockClient, CallOutcome, Credentials
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.node import TENANT
from reference_impl.blockservice.peers import read_address
from reference_impl.content import BLOCK_TOKENS, block_digests
from reference_impl.router.legs import Fields
from reference_impl.rules.blockgroups import GroupState
from reference_impl.rules.retries import RetryPolicy

LIST_S: Final = 1.0
LOAN_S: Final = 0.5
"""Longest wait for a loan: a prompt that is worth one takes longer to compute."""
LEAST_TOKENS: Final = 256
"""What must be saved for a loan to be worth its round trips."""
POLICY: Final = RetryPolicy(attempts_max=2, attempt_timeout_s=0.25)
_PROMPT: Final = msgspec.json.Decoder(str | list[int])


class Known(msgspec.Struct, frozen=True):
    """A group, as a node listed it."""

    node: str
    block_group_id: str
    epoch: int


class Prefixes:
    """What the nodes of a deployment hold. `borrowed` and `computed` count what became of prompts worth a loan."""

    def __init__(self, run_dir: Path, nodes: list[str], secret: bytes) -> None:
        self._run_dir, self._nodes = run_dir, nodes
        self._who = Credentials(TENANT, credential(secret, TENANT))
        self._clients: dict[str, BlockClient] = {}
        self._known: dict[str, dict[bytes, Known]] = {node: {} for node in nodes}
        """By node and the digest of a group's last block."""
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self.borrowed = 0
        self.computed = 0

    @property
    def known(self) -> dict[str, int]:
        """How many groups each node was last known to have."""
        return {node: len(groups) for node, groups in self._known.items()}

    async def run(self) -> None:
        """Learn what there is, until cancelled."""
        try:
            while True:
                await asyncio.gather(*(self._list(node) for node in self._nodes))
                await asyncio.sleep(LIST_S)
        finally:
            for client in self._clients.values():
                await client.close()

    async def borrow(self, fields: Fields, worker_id: str) -> msgspec.Raw | None:
        """Return the hand-off of the longest prefix that another node than `worker_id` lends; None: compute."""
        best = self._best(_tokens_of(fields), worker_id)
        client = self._clients.get(best.node) if best else None
        if best is None or client is None:
            return None
        operation_id = f"router-{self._run}-{next(self._numbers)}"
        result = await client.prepare_get(
            best.block_group_id, best.epoch, operation_id, operation_id=operation_id, timeout_s=LOAN_S
        )  # fmt: skip
        if result.outcome is CallOutcome.OK and isinstance(result.reply, pb.Answer):
            self.borrowed += 1
            return msgspec.Raw(result.reply.place.handoff.encode())
        self.computed += 1
        return None

    def _best(self, prompt: list[int], worker_id: str) -> Known | None:
        """Return the group with the longest prefix of a prompt, if it saves enough at this worker."""
        if len(prompt) <= LEAST_TOKENS:
            return None
        own = self._known.get(worker_id, {})
        digests = block_digests(prompt[: len(prompt) - 1])
        for count in range(len(digests), LEAST_TOKENS // BLOCK_TOKENS - 1, -1):
            digest = digests[count - 1]
            if digest in own:
                return None
            found = next((k[digest] for node, k in self._known.items() if node != worker_id and digest in k), None)
            if found is not None:
                here = next((n for n in range(count - 1, 0, -1) if digests[n - 1] in own), 0)
                return found if (count - here) * BLOCK_TOKENS >= LEAST_TOKENS else None
        return None

    async def _list(self, node: str) -> None:
        """Ask one node; one that does not answer keeps what it was known to have, and its breaker spares it."""
        if node not in self._clients:
            address = read_address(self._run_dir, node)
            if address is None:
                return
            self._clients[node] = BlockClient(address.target, self._who, policy=POLICY, connections=1)
        result = await self._clients[node].list_groups(state=GroupState.RESIDENT, timeout_s=LIST_S)
        if isinstance(result.reply, pb.ListGroupsReply):
            groups = [Known(node, g.block_group_id, g.epoch) for g in result.reply.groups]
            self._known[node] = {_last_digest(g.block_group_id): g for g in groups}


def _last_digest(block_group_id: str) -> bytes:
    """Return the digest that a group is named after."""
    return bytes.fromhex(block_group_id.rpartition(".")[2])


def _tokens_of(fields: Fields) -> list[int]:
    """Return the tokens of a completion's prompt; none of what is no such prompt: its engine says what is wrong."""
    given = fields.get("prompt")
    if given is None:
        return []
    try:
        prompt = _PROMPT.decode(given)
    except msgspec.DecodeError:
        return []
    found = tokens.encode(prompt) if isinstance(prompt, str) else prompt
    return found if all(0 <= token < tokens.VOCABULARY for token in found) else []
