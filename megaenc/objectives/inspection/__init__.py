"""Commands that show what an objective does: `megaenc data inspect` and `megaenc objective check`."""
