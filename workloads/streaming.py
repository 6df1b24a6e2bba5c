"""One streamed request on gevent, with honest stamps.

geventhttpclient's own sockets and locust's `iter_lines` are passed by: the latter waits for 1,024 bytes and so spoils
every TTFT. Here each read takes what is there and stamps it at once; geventhttpclient's C parser undoes the HTTP.

A request has three parts: `prepare` makes every byte and connects ahead of the moment, `send` writes at the moment,
and `receive` reads to the end. Each request has its own connection: a kept one may be closed by the server in the
same moment, and the failure would be the client's making.
"""

from __future__ import annotations

import os
from typing import Any, Final

import gevent
import msgspec
from gevent.event import AsyncResult
from geventhttpclient.response import HTTPParseError

from reference_impl.realclock import now_ns
from workloads.answer import Answer
from workloads.host import READ_BYTES, Host, Reply
from workloads.rows import Outcome
from workloads.sse import BadStream, error_text

LINGER_S: Final = 1.0
"""How long the end of the HTTP message may come after [DONE]; the answer itself is complete by then."""
ERROR_BODY_BYTES_MAX: Final = 65536
ERROR_TEXT_MAX: Final = 300
_READABLE: Final = 1


class Stopped(BaseException):
    """Thrown into a request that still runs when the load is stopped. No Exception, so that nothing swallows it."""


class Exchange(msgspec.Struct, kw_only=True):
    """What was seen of one request. Times are monotonic ns, 0 for what never happened."""

    send_began_ns: int = 0
    sent_ns: int = 0
    first_byte_ns: int = 0
    end_ns: int = 0
    http_status: int = 0
    outcome: Outcome = Outcome.UNKNOWN
    error: str = ""
    stopped: bool = False
    """Broken off by the end of the load: neither the server's fault nor the client's."""
    node_d: str = ""
    node_p: str = ""


class StreamedRequest:
    """One request to `host`: `prepare`, then `exchange` at the moment. What it saw is in `seen` and `answer`."""

    def __init__(self, host: Host, path: str, request_id: str, body: bytes) -> None:
        fields = {
            "Content-Type": "application/json", "Accept": "text/event-stream", "User-Agent": "pdproof",
            "X-Request-Id": request_id, "Content-Length": str(len(body)),
        }  # fmt: skip
        self._host = host
        self._bytes = host.head("POST", path, fields) + body
        self._socket: Any = None
        self._refusal = b""
        self.seen = Exchange()
        self.answer = Answer()

    def prepare(self) -> None:
        """Connect ahead of the moment. If that fails, the moment itself tries again and tells."""
        try:
            self._socket = self._host.connect()
        except OSError:
            self._socket = None

    def exchange(self, timeout_s: float) -> None:
        """Send now, and read until the answer is complete, broken or `timeout_s` over. Never raises."""
        seen = self.seen
        seen.send_began_ns = now_ns()
        reply = Reply()
        try:
            with gevent.Timeout(timeout_s):
                self._send()
                self._receive(reply)
        except gevent.Timeout:
            seen.outcome, seen.error = Outcome.UNKNOWN, f"no end within {timeout_s:g} s"
        except Stopped:
            seen.outcome, seen.error, seen.stopped = Outcome.UNKNOWN, "the load was stopped while it ran", True
        except BadStream as error:
            seen.outcome, seen.error = Outcome.FAIL, str(error)
        except (OSError, HTTPParseError) as error:
            self._broken(error)
        seen.end_ns = self.answer.done_ns or now_ns()
        seen.error = " ".join(seen.error.split())[:ERROR_TEXT_MAX]
        if seen.outcome is Outcome.OK:
            self._see_out(reply)
        self.close()

    def close(self) -> None:
        """Give the connection back to the kernel."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self) -> None:
        if self._socket is None:
            self._socket = self._host.connect()
        self._socket.sendall(self._bytes)
        self.seen.sent_ns = now_ns()

    def _receive(self, reply: Reply) -> None:
        """Read the reply. Each read takes what is there; its stamp is that of all events which it completes."""
        if self._host.encrypted:
            while not self._got(reply, self._socket.recv(READ_BYTES), now_ns()):
                pass
        else:
            self._watch(reply)
        seen = self.seen
        if seen.http_status == 200:
            seen.outcome, seen.error = self.answer.verdict()
        elif seen.http_status:
            seen.outcome, seen.error = Outcome.FAIL, f"HTTP {seen.http_status}: {_words(self._refusal)}"
        else:
            seen.outcome, seen.error = Outcome.FAIL, "the connection was closed without an answer"

    def _watch(self, reply: Reply) -> None:
        """Read in the event loop itself, whenever the kernel has something.

        A greenlet's `recv` costs a vain read, a switch and a new watcher for each chunk: 30 us of a core against 13.
        """
        descriptor = self._socket.fileno()
        over: AsyncResult[None] = AsyncResult()
        watcher = gevent.get_hub().loop.io(descriptor, _READABLE)

        def on_readable() -> None:
            try:
                data = os.read(descriptor, READ_BYTES)
                t_ns = now_ns()
                if self._got(reply, data, t_ns):
                    watcher.stop()
                    over.set(None)
            except BlockingIOError:
                return
            except (OSError, HTTPParseError, BadStream) as error:
                watcher.stop()
                over.set_exception(error)

        watcher.start(on_readable)
        try:
            over.get()
        finally:
            watcher.stop()
            watcher.close()

    def _got(self, reply: Reply, data: bytes, t_ns: int) -> bool:
        """Take what one read returned, nothing at the end of the connection. Return whether the answer is over."""
        if not data:
            return True
        reply.feed(data)
        seen, answer = self.seen, self.answer
        if not seen.http_status:
            seen.first_byte_ns = seen.first_byte_ns or t_ns
            if not reply.headers_complete:
                return False
            self._head(reply)
        if seen.http_status != 200:
            self._refusal += reply.take()
            return bool(reply.message_complete) or len(self._refusal) > ERROR_BODY_BYTES_MAX
        answer.take(reply.take(), t_ns)
        return bool(answer.done_ns or answer.error or reply.message_complete)

    def _head(self, reply: Reply) -> None:
        self.seen.http_status = reply.get_code()
        names = [reply.field("x-pdproof-worker"), reply.field("x-pdproof-engine")]
        self.seen.node_d = "/".join(name for name in names if name)
        self.seen.node_p = reply.field("x-pdproof-prefill-worker")

    def _see_out(self, reply: Reply) -> None:
        """Read the end of the HTTP message, so that the server sees no reset. The answer stands whatever happens."""
        try:
            self._socket.settimeout(LINGER_S)
            while not reply.message_complete:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    return
                reply.feed(data)
        except (OSError, HTTPParseError, Stopped):
            return

    def _broken(self, error: Exception) -> None:
        seen = self.seen
        seen.outcome = Outcome.FAIL
        if not seen.sent_ns:
            seen.error = f"could not be sent to {self._host.url}: {error or type(error).__name__}"
        else:
            seen.error = f"the connection broke after {self.answer.chunk_count} chunks: {error or type(error).__name__}"


def _words(body: bytes) -> str:
    """Return the message of an error body: OpenAI's object, vLLM's older one, or the text as it is."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")
    if isinstance(found, dict):
        return error_text(found.get("error") or found.get("message") or found.get("detail") or found)
    return str(found)
