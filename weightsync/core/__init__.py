"""The algebra and the rules of weight updates: no gRPC, no torch, no numpy."""
