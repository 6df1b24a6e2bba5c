"""A mocker as Dynamo's is seen from outside: a port, and a file that is kept young while the process lives."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

KEEP_S = 0.1

if __name__ == "__main__":
    if os.environ.get("FAKE_DYNAMO_FAILS"):
        sys.exit("no such model here")
    port = int(os.environ["DYN_TCP_RPC_PORT"])
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    # Above 2**63, as Dynamo's ids may be; one that another endpoint of the same port must not be mistaken for.
    instance = 2**63 + os.getpid()
    card = {"instance_id": instance, "endpoint": "generate", "transport": {"tcp": f"127.0.0.1:{port}/x/generate"}}
    path = Path(os.environ["DYN_FILE_KV"], f"{instance}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(card))
    part.rename(path)
    while True:
        path.touch()
        time.sleep(KEEP_S)
