"""Floor 4: tensor streams between workers over gRPC, an in-memory twin for tests, blobs, channel settings."""
