"""Floor 2: who computes what. Pure functions from a cluster, a graph and a job to a plan."""
