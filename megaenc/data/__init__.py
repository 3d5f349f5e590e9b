"""From text to packs: readers, tokenisation to .bin/.idx, blending, packs and the sampler."""
