"""The coordinator's decisions: pure functions from the state, what is known of the living, and a request, to events."""
