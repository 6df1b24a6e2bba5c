"""The control plane of one node's block groups: SQLite operation log, gRPC server and client."""

import os

# Before gRPC is loaded. It would tell of every connection that ends; and its handlers of fork(), which none of our
# children need, can leave a child standing still when another thread is inside gRPC.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
