"""One life of a vLLM engine core: the real scheduler with a real connector, both sides of it, and a model of our own.

Its loop is that of vLLM's `EngineCore`: a step only while the scheduler says that there is something to do.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from harness.conformance.subject import (
    EXPIRED,
    FAILED_HANDSHAKES,
    FAILED_READS,
    LATE,
    UNSENT_HEARTBEATS,
    Ending,
    EngineSpec,
    Host,
    How,
    Params,
    Refused,
    Request,
)
from harness.conformance.subjects.vllm.content import Pages, next_token

if TYPE_CHECKING:
    from harness.conformance.subjects.vllm.subject import VllmSubject

BLOCK_TOKENS: Final = 32
"""The least that the attention of vLLM's CPU build takes."""
_COUNTERS: Final = {
    "num_kv_expired_reqs": EXPIRED,
    "num_notifications_after_expiry": LATE,
    "num_failed_transfers": FAILED_READS,
    "num_failed_handshakes": FAILED_HANDSHAKES,
    "num_failed_notifications": UNSENT_HEARTBEATS,
}
"""vLLM's counters by the suite's names: each is taken by its word."""


class VllmEngine:
    """See above. `subject` brings what engines share; it has put this engine's doubles in their places."""

    def __init__(self, subject: VllmSubject, spec: EngineSpec, host: Host) -> None:
        self._subject, self._spec, self._host = subject, spec, host
        self._counts: Counter[str] = Counter()
        self._endings: list[Ending] = []
        self._right: dict[str, bool] = {}
        self._loaded: dict[str, int] = {}
        self._answers: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        self._inner: dict[str, str] = {}
        """What vLLM calls a request."""
        self.inbox: Any = None
        """The agent that takes notifications in, if this connector has one."""
        self.executor: Any = None
        self.answers: Any = None
        self.background: Any = None
        """One turn of a thread of the connector's that a real engine would run beside its loop."""
        with subject.time.of(host):
            config = subject.config_of(spec)
            layout = subject.layout_of(spec)
            self._scheduler = Scheduler(
                vllm_config=config, kv_cache_config=layout, structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS, log_stats=True,
            )  # fmt: skip
            self._connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, layout)
            cache, pages = subject.cache_of(spec)
            self._cache, self._pages = cache, Pages(pages)
            self._forward = _Forward(cache)
            self._connector.register_kv_caches(cache)
            subject.introduce(self, self._scheduler.connector, self._connector)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def submit(self, request: Request) -> None:
        """Queue a request, as the engine core does; what the front door refuses is aborted there, as vLLM does."""
        params = {"kv_transfer_params": dict(request.params)} if request.params is not None else None
        too_long = len(request.prompt) + request.max_tokens > self._subject.longest_tokens
        made = VllmRequest(
            request_id=self._subject.inner(request), prompt_token_ids=list(request.prompt),
            sampling_params=SamplingParams(
                max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, extra_args=params
            ),
            pooling_params=None, block_hasher=self._hasher, abort_immediately=too_long,
        )  # fmt: skip
        with self._subject.time.of(self._host):
            self._scheduler.add_request(made)
            if too_long:
                self._scheduler.finish_requests([made.request_id], RequestStatus.FINISHED_ABORTED)
        if too_long:
            raise Refused(f"the prompt and its answer have more than {self._subject.longest_tokens} tokens")
        self._prompts[made.request_id] = len(request.prompt)
        self._inner[request.request_id] = made.request_id

    def abort(self, request_id: str) -> None:
        """Its client has gone."""
        inner = self._inner.get(request_id, request_id)
        known = self._scheduler.requests.get(inner)
        with self._subject.time.of(self._host):
            self._scheduler.finish_requests([inner], RequestStatus.FINISHED_ABORTED)
        if known is not None and inner in self._prompts:
            self._over(Ending(request_id=inner, how=How.ABORTED))

    def deliver(self, sender: str, message: bytes, rank: int, to_rank: int) -> None:  # noqa: ARG002 # one rank
        """A notification has arrived."""
        if self.inbox is not None:
            self.inbox.arrived(f"{sender}/{rank}", message)

    def answer(self, question: bytes) -> bytes | None:
        """Answer at the side channel."""
        if self.answers is None:
            return None
        with self._subject.time.of(self._host):
            reply: bytes | None = self.answers(question)
        return reply

    def step(self) -> None:
        """One turn of the engine core's loop."""
        with self._subject.time.of(self._host):
            if self.background is not None:
                self.background()
            if self._scheduler.has_requests():
                self._turn()
            if self.background is not None:
                self.background()

    def _turn(self) -> None:
        scheduler, connector = self._scheduler, self._connector
        output = scheduler.schedule()
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        early = output.has_sync_kv_loads
        if early:
            connector.start_load_kv(self._forward)
        ids, tokens = self._computed(output)
        for layer, cache in self._cache.items():
            connector.save_kv_layer(layer, cache, None)
        if not early:
            connector.start_load_kv(self._forward)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        moved = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving,
            failed_recving=results.failed_recving, invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )  # fmt: skip
        connector.clear_connector_metadata()
        self._count(moved.kv_connector_stats)
        made = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: place for place, name in enumerate(ids)}, sampled_token_ids=tokens,
            kv_connector_output=moved,
        )  # fmt: skip
        for outputs in scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                self._told(one)

    def _computed(self, output: Any) -> tuple[list[str], list[list[int]]]:
        """Write the slots of the tokens that are computed now, and say what comes next where a prompt is whole."""
        ids, said = [], []
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            blocks = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            known = list(request.all_token_ids)
            end = min(request.num_computed_tokens, len(known))
            start = end - count
            wrong = self._pages.wrong(blocks, known, start)
            self._right[name] = self._right.get(name, True) and wrong is None
            self._pages.write(blocks, known, start, end)
            ids.append(name)
            said.append([next_token(known)] if end >= len(known) else [])
        return ids, said

    def _told(self, output: Any) -> None:
        stats = getattr(output, "prefill_stats", None)
        if stats is not None:
            self._loaded[output.request_id] = stats.num_external_cached_tokens
        self._answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finish_reason is None:
            return
        how = {FinishReason.LENGTH: How.ANSWERED, FinishReason.STOP: How.ANSWERED, FinishReason.ABORT: How.ABORTED}
        found = how.get(output.finish_reason, How.FAILED)
        name = output.request_id
        right = self._right.get(name, True) if found is How.ANSWERED else None
        error = "" if found is not How.FAILED else f"finish reason {output.finish_reason.name}"
        self._over(
            Ending(
                request_id=name, how=found, hand_off=output.kv_transfer_params, answer=self._answers.pop(name, []),
                right=right, loaded=self._loaded.get(name, 0), error=error,
            )
        )  # fmt: skip

    def _over(self, ending: Ending) -> None:
        self._prompts.pop(ending.request_id, None)
        self._right.pop(ending.request_id, None)
        self._loaded.pop(ending.request_id, None)
        self._endings.append(msgspec.structs.replace(ending, request_id=self._subject.outer(ending.request_id)))

    def renew(self, hand_off: Params) -> Params | None:  # noqa: ARG002 # the interface's
        """No connector of vLLM's can."""
        return None

    def ended(self) -> list[Ending]:
        """Return what ended."""
        endings, self._endings = self._endings, []
        return endings

    def holds(self) -> dict[str, list[int]]:
        """Return whose blocks the scheduler keeps."""
        manager = self._scheduler.kv_cache_manager
        found = {name: manager.get_block_ids(name)[0] for name in self._scheduler.requests}
        return {self._subject.outer(name): list(blocks) for name, blocks in found.items() if blocks}

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters by the suite's names."""
        return {name: float(self._counts[name]) for name in self._subject.counted}

    def _count(self, stats: Any) -> None:
        """Add up a step's counters; a connector of connectors has them by the names of its parts."""
        if stats is None or not isinstance(stats.data, dict):
            return
        for part in [stats, *(found for found in stats.data.values() if hasattr(found, "data"))]:
            for theirs, ours in _COUNTERS.items():
                self._counts[ours] += len(part.data.get(theirs) or [])

    def close(self) -> None:
        """End it, whatever its background work is doing. Its memory stays while a peer may still read it."""
        if self.executor is not None:
            self.executor.shutdown()
        self._subject.forget(self._spec.name)


class _Layer:
    """An attention layer, as far as connectors look at one."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.kv_cache = cache


class _Forward:
    """A forward pass, as far as connectors look at one: which layers there are, and where their KV lies."""

    def __init__(self, cache: dict[str, torch.Tensor]) -> None:
        self.no_compile_layers = {name: _Layer(tensor) for name, tensor in cache.items()}
        self.attn_metadata = dict.fromkeys(cache, object())


def threads_off() -> None:
    """Have torch compute with one thread: a world's engines take turns."""
    torch.set_num_threads(1)
