"""Floor 7: the coordinator. Registers nodes, plans jobs, watches leases, keeps state. Never imports torch."""
