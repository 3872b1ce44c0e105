"""Floor 2: who computes what. Pure functions from a cluster, a graph and a job to a plan."""

from fusion.plan.equal_compute import plan

__all__ = ["plan"]
