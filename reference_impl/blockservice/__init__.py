"""The control plane of one node's block groups: SQLite operation log, gRPC server and client."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is loaded: it tells every connection that ends
