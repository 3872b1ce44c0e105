"""Floor 5: the Python way to define a job, run it here or submit it, and follow it. Import from `fusion` itself."""
