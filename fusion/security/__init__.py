"""Floor 3: who is who. The CA, join tokens, TLS credentials, and who may call what."""
