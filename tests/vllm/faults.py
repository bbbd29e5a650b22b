"""What a test does inside a worker process; vLLM makes it a base of its worker class."""

from __future__ import annotations

from typing import Any


class Faults:
    """Methods for `collective_rpc`."""

    rank: int

    def lose_weights_asleep(self) -> None:
        """Let a worker say that its sleep frees memory, which on the CPU it does not."""
        worker: Any = self
        worker.vllm_config.model_config.enable_sleep_mode = True

    def fail_next_packing(self, rank: int) -> None:
        """Let one module of one rank fail to pack its weights, once."""
        if self.rank != rank:
            return
        worker: Any = self
        method = worker.get_model().model.layers[1].mlp.down_proj.quant_method
        process = method.process_weights_after_loading

        def fail(_module: object) -> None:
            method.process_weights_after_loading = process
            raise RuntimeError("no memory for the packed weights")

        method.process_weights_after_loading = fail
