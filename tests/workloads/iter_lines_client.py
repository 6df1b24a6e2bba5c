"""The broken twin of the load client: reads with locust's own `iter_lines`, which waits for 1,024 bytes at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from locust import FastHttpUser, task
from locust.env import Environment

from reference_impl.realclock import now_ns
from workloads.answer import Answer
from workloads.prompts import Api, PromptFormat, prompt_tokens, request_body
from workloads.row_file import RowFile
from workloads.rows import Outcome, PromptSpec, RequestRecord

TOKENS = 40


class TwinUser(FastHttpUser):
    @task
    def idle(self) -> None: ...


def one(client: Any, index: int) -> RequestRecord:
    prompt = PromptSpec(0, index, 50)
    tokens, form = prompt_tokens(prompt), PromptFormat.IDS
    body = request_body(tokens, model="golden", max_tokens=TOKENS, api=Api.COMPLETIONS, prompt_format=form)
    answer = Answer()
    headers = {"X-Request-Id": f"twin-{index}", "Content-Type": "application/json"}
    sent_ns = now_ns()
    for line in client.iter_lines("/v1/completions", method="POST", data=body, headers=headers):
        answer.take(line.encode() + b"\n", now_ns())
    return RequestRecord(
        request_id=f"twin-{index}", prompt=prompt, max_tokens=TOKENS, intended_ns=sent_ns, send_began_ns=sent_ns,
        sent_ns=sent_ns, end_ns=now_ns(), chunks=answer.chunks, outcome=Outcome.OK,
    )  # fmt: skip


def main(url: str, rows: str) -> None:
    TwinUser.host = url
    client = TwinUser(Environment(user_classes=[TwinUser], host=url)).client
    file = RowFile(Path(rows))
    for index in range(3):
        file.write(one(client, index))


if __name__ == "__main__":
    main(*sys.argv[1:])
