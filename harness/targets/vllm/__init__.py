"""The system `vllm`: real vLLM servers, each watched by a guard, behind the reference implementation's router."""
