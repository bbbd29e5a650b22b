"""The service inside vLLM, as the weight transfer backend `weightsync`."""
