"""The command `megaenc data inspect`, which shows the targets of an objective on packs of a corpus."""
