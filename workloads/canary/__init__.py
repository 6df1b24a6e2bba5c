"""The canary: a small model of real shape whose every answer depends on every KV block, and can be checked."""
