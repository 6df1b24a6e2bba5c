"""An OpenAI-compatible endpoint: its address, its connections, and the HTTP/1.1 around what is said to it."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import gevent
import gevent.socket
import gevent.ssl
import msgspec
from geventhttpclient.response import HTTPResponse

READ_BYTES: Final = 16384
"""One read: far more than an event, and small enough that the buffer for it is cheap to make."""
CONNECT_TIMEOUT_S: Final = 5.0


class HostRefused(ValueError):
    """A host is no URL that can be used."""


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
        self.encrypted = parts.scheme == "https"
        self._tls = None
        if self.encrypted:
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


class Reply(HTTPResponse):
    """geventhttpclient's parser of a reply; `piece` takes the body bytes that one `feed` uncovered."""

    def __init__(self) -> None:
        super().__init__(method="POST")
        self.piece = b""

    def _on_body(self, buf: bytearray) -> None:
        self.piece += buf

    def take(self) -> bytes:
        """Return the body bytes since the last call."""
        piece, self.piece = self.piece, b""
        return piece

    def field(self, name: str) -> str:
        """Return a header field, "" if it is missing or comes twice."""
        value = self.get(name)
        return value if isinstance(value, str) else ""


def get_json(host: Host, path: str, timeout_s: float) -> Any:
    """Return what GET `path` answers, decoded; None if it is no JSON or not status 200.

    Raises OSError if nothing answers within `timeout_s`, HTTPParseError if the answer is no HTTP.
    """
    status, body = _ask(host, host.head("GET", path, {}), timeout_s)
    return _decoded(body) if status == 200 else None


def post_json(host: Host, path: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
    """Send `body` to `path`; return the status, and what was answered, decoded (None if it is no JSON).

    Raises as `get_json`.
    """
    head = host.head("POST", path, {"Content-Type": "application/json", "Content-Length": str(len(body))})
    status, answer = _ask(host, head + body, timeout_s)
    return status, _decoded(answer)


def _ask(host: Host, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    reply, body = Reply(), b""
    with gevent.Timeout(timeout_s, TimeoutError(f"no answer within {timeout_s:g} s")):
        sock = host.connect()
        try:
            sock.sendall(request)
            while not reply.message_complete and (data := sock.recv(READ_BYTES)):
                reply.feed(data)
                body += reply.take()
        finally:
            sock.close()
    if not reply.headers_complete:
        raise ConnectionError("the connection was closed without an answer")
    return reply.get_code(), body


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
