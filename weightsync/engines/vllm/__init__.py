"""The engine for a vLLM worker. Only a process that runs vLLM imports its modules."""
