"""A KV connector made for reading."""
