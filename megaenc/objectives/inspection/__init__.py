"""Command `megaenc data inspect`, which shows an objective's targets on packs."""
