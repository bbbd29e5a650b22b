"""The gRPC side of a worker: services, health, metrics, logs, settings."""
