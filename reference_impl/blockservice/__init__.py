"""The control plane of one node's block groups: SQLite operation log, gRPC server and client."""
