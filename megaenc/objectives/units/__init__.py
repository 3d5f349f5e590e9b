"""Units of several tokens that masking hides together: words and collocations."""
