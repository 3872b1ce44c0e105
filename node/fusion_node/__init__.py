"""Floor 7: the node. A light daemon without torch, and the worker process that it starts for each stage."""
