"""Floor 2: how one tensor becomes bytes and comes back."""
