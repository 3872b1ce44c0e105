"""Floor 1: the OP-DAG, its operators' table, legal cuts, shards and costs. Pure: no torch, no I/O."""
