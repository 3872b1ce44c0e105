"""Floor 3: the dataclasses that the package thinks in, to and from protobuf, in one place."""
