"""Manifest of a study: schema, expansion into models, arguments of their runs."""
