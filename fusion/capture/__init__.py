"""Floor 2: turn an nn.Module with its loss into an OP-DAG with shapes and costs (torch)."""

from fusion.capture.capture import Captured, capture

__all__ = ["Captured", "capture"]
