"""The manifest of a study: its schema, its expansion into runs, and the arguments that they get."""
