"""Between protobuf and the core: parse, check, serialize; knows neither gRPC nor torch."""
