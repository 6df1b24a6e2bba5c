"""The reference engine: an OpenAI-compatible server over a paged pool of real bytes."""
