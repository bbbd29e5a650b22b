"""Staging memory: where a session's bytes wait until they are committed."""
