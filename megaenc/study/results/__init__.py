"""Results of a study: collection, grouping, and the published tables."""
