"""Floor 6: the `fusion` command. Each subcommand has a file of its own, loaded when it is called."""
