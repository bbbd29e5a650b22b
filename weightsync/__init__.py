"""Puts new weights into running inference workers.

Importing this package imports none of torch, grpc and protobuf: the parts that need them are
imported by name.
"""

from __future__ import annotations

__version__ = "0.1.0"
