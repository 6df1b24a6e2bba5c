"""Stands in for a vLLM server in tests of what surrounds it: three processes that call themselves as vLLM's do.

It serves `/health` and greedy completions of one kind; like vLLM's, its engine core and worker outlive its API server.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PR_SET_NAME = 15


def call_oneself(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


class Handler(BaseHTTPRequestHandler):
    answer = 7

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply({"choices": [{"token_ids": [self.answer] * asked["max_tokens"], "finish_reason": "length"}]})

    def reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="api")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--start-s", type=float, default=0.2)
    parser.add_argument("--answer", type=int, default=7)
    parser.add_argument("--fail", action="store_true")
    own = parser.parse_args()
    if own.fail:
        print("no memory for the KV cache", flush=True)  # noqa: T201 # its last word
        sys.exit(3)
    me = [sys.executable, __file__]
    if own.role == "core":
        call_oneself("VLLM::EngineCore")
        subprocess.Popen([*me, "--role", "worker"])  # it says for both that they are there
        time.sleep(600)
    elif own.role == "worker":
        call_oneself("VLLM::Worker")
        print("named", flush=True)  # noqa: T201 # read by its API server
        time.sleep(600)
    else:
        time.sleep(own.start_s)
        core = subprocess.Popen([*me, "--role", "core"], stdout=subprocess.PIPE)
        assert core.stdout is not None
        core.stdout.readline()
        Handler.answer = own.answer
        ThreadingHTTPServer(("127.0.0.1", own.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
