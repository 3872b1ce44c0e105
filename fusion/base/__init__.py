"""Floor 0: what every other part may lean on: identifiers, errors, units, time. No torch, no I/O."""
