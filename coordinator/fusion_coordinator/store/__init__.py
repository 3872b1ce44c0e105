"""Where the coordinator's memory lies: an interface, SQLite, and an in-memory twin under one contract suite."""
