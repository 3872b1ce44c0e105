"""Floor 4: one stage at work: its operators, its schedule, its optimizer, its data."""
