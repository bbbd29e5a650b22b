"""Adapters: what weightsync asks of an inference engine, and the engines that answer."""
