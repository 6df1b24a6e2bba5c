"""Black-box cases: what is done to a prefill and a decode server, and what must be seen of them from outside."""
