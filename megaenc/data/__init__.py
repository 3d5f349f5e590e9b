"""From text to packs: readers, tokenizers, the .bin/.idx of a corpus, packs and their order."""
