"""Floor 3: what people see of the running parts: logs, and the doctors' checks."""
