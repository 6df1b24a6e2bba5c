"""The memory service (GMS): device memory that outlives the engines that use it."""
