"""`weightsync demo-vllm`: a pair of models is trained and pushed into a real vLLM."""
