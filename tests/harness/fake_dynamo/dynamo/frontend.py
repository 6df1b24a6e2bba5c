"""A front end as Dynamo's is seen from outside: instances by files, stale ones listed until their files are old.

It answers by itself for an instance whose port is open, and with 503 for one whose port is not.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STALE_S = 1.0
TURNS = itertools.count()


def instances() -> list[dict[str, Any]]:
    found = []
    for path in sorted(Path(os.environ["DYN_FILE_KV"]).glob("*.json")):
        if time.time() - path.stat().st_mtime < STALE_S:
            found.append(json.loads(path.read_text()))
    return found


def listens(instance: dict[str, Any]) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(instance["transport"]["tcp"].split(":")[1].split("/")[0]))).close()
    except OSError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(200, {"status": "healthy", "instances": instances()})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        listed = [i for i in instances() if i["endpoint"] == "generate"]
        wanted = asked["nvext"].get("backend_instance_id")
        if wanted is not None:
            listed = [i for i in listed if i["instance_id"] == wanted]
        if not listed:
            self.reply(404, {"message": "no such model"})
            return
        chosen = listed[next(TURNS) % len(listed)]
        if not listens(chosen):
            self.reply(503, {"message": "Service temporarily unavailable", "code": 503})
            return
        named = {"worker_id": {"prefill_worker_id": 1, "decode_worker_id": chosen["instance_id"]}}
        self.reply(200, {"choices": [{"text": " aa", "index": 0, "finish_reason": "length"}], "nvext": named})

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--http-port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
