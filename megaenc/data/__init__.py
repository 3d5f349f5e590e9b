"""From text to packs: corpora on disk, the split by document, and the order in which a run sees them."""
