"""One streamed request on gevent, with honest stamps.

geventhttpclient's own sockets and locust's `iter_lines` are passed by: the latter waits for 1,024 bytes and so spoils
every TTFT. Here each read takes what is there and stamps it at once; geventhttpclient's C parser undoes the HTTP.

A request has three parts: `prepare` makes every byte and connects ahead of the moment, `send` writes at the moment,
and `receive` reads to the end. Each request has its own connection: a kept one may be closed by the server in the
same moment, and the failure would be the client's making.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import gevent
import gevent.socket
import gevent.ssl
import msgspec
from geventhttpclient.response import HTTPParseError, HTTPResponse

from reference_impl.realclock import now_ns
from workloads.answer import Answer
from workloads.rows import Outcome
from workloads.sse import BadStream, error_text

READ_BYTES: Final = 65536
CONNECT_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 1.0
"""How long the end of the HTTP message may come after [DONE]; the answer itself is complete by then."""
ERROR_BODY_BYTES_MAX: Final = 65536
ERROR_TEXT_MAX: Final = 300


class HostRefused(ValueError):
    """A host is no URL that can be used."""


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


class Host:
    """An OpenAI-compatible endpoint, its name looked up once so that no request waits for a look-up.

    Raises `HostRefused` if `url` is none, OSError if its name is not known.
    """

    def __init__(self, url: str, verify: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise HostRefused(f"--host must be a URL such as http://127.0.0.1:8000, got {url!r}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise HostRefused(f"--host {url!r}: {error}") from None
        self.url = url
        self.name = parts.hostname
        self.authority = parts.netloc.rpartition("@")[2]
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        found = gevent.socket.getaddrinfo(self.name, port, 0, gevent.socket.SOCK_STREAM)
        self._addresses = [(family, address) for family, _, _, _, address in found]
        self._tls = None
        if parts.scheme == "https":
            self._tls = gevent.ssl.create_default_context() if verify else gevent.ssl._create_unverified_context()

    def connect(self) -> Any:
        """Return a connected socket that waits without limit (a request's own time limit ends it). Raises OSError."""
        problem = OSError(f"no address for {self.name}")
        for family, address in self._addresses:
            sock = gevent.socket.socket(family, gevent.socket.SOCK_STREAM)
            try:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.connect(address)
                # A last, small segment must not wait for the acknowledgement of the rest.
                sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_hostname=self.name)
                sock.settimeout(None)
            except OSError as error:
                sock.close()
                problem = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise problem

    def head(self, method: str, path: str, fields: dict[str, str]) -> bytes:
        """Return the head of an HTTP/1.1 request to `path` below this host."""
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {self.authority}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class _Reply(HTTPResponse):
    """geventhttpclient's parser of a reply; `piece` takes the body bytes that one `feed` uncovered."""

    def __init__(self) -> None:
        super().__init__(method="POST")
        self.piece = b""

    def _on_body(self, buf: bytearray) -> None:
        self.piece += buf

    def take(self) -> bytes:
        piece, self.piece = self.piece, b""
        return piece

    def field(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ""


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
        reply = _Reply()
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

    def _receive(self, reply: _Reply) -> None:
        """Read the reply. Each read takes what is there; its stamp is that of all events which it completes."""
        seen, answer = self.seen, self.answer
        receive, feed = self._socket.recv, reply.feed
        while data := receive(READ_BYTES):
            t_ns = now_ns()
            feed(data)
            if not seen.first_byte_ns:
                seen.first_byte_ns = t_ns
            if not seen.http_status:
                if not reply.headers_complete:
                    continue
                if self._head(reply) != 200:
                    self._refused(reply)
                    return
            answer.take(reply.take(), t_ns)
            if answer.done_ns or answer.error or reply.message_complete:
                break
        if seen.http_status:
            seen.outcome, seen.error = answer.verdict()
        else:
            seen.outcome, seen.error = Outcome.FAIL, "the connection was closed without an answer"

    def _head(self, reply: _Reply) -> int:
        self.seen.http_status = status = int(reply.get_code())
        names = [reply.field("x-pdproof-worker"), reply.field("x-pdproof-engine")]
        self.seen.node_d = "/".join(name for name in names if name)
        self.seen.node_p = reply.field("x-pdproof-prefill-worker")
        return status

    def _refused(self, reply: _Reply) -> None:
        """Read an error reply to its end for the server's own words."""
        body = reply.take()
        while not reply.message_complete and len(body) < ERROR_BODY_BYTES_MAX:
            data = self._socket.recv(READ_BYTES)
            if not data:
                break
            reply.feed(data)
            body += reply.take()
        self.seen.outcome = Outcome.FAIL
        self.seen.error = f"HTTP {self.seen.http_status}: {_words(body)}"

    def _see_out(self, reply: _Reply) -> None:
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
            chunks = len(self.answer.chunks)
            seen.error = f"the connection broke after {chunks} chunks: {error or type(error).__name__}"


def _words(body: bytes) -> str:
    """Return the message of an error body: OpenAI's object, vLLM's older one, or the text as it is."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")
    if isinstance(found, dict):
        return error_text(found.get("error") or found.get("message") or found.get("detail") or found)
    return str(found)


def get_json(host: Host, path: str, timeout_s: float) -> Any:
    """Return what GET `path` answers, decoded; None if it is no JSON or not status 200.

    Raises OSError if nothing answers within `timeout_s`.
    """
    reply, body = _Reply(), b""
    with gevent.Timeout(timeout_s, TimeoutError(f"no answer within {timeout_s:g} s")):
        sock = host.connect()
        try:
            sock.sendall(host.head("GET", path, {}))
            while not reply.message_complete and (data := sock.recv(READ_BYTES)):
                reply.feed(data)
                body += reply.take()
        finally:
            sock.close()
    if reply.get_code() != 200:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
