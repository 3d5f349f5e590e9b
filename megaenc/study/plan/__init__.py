"""`megaenc study plan`: graph of stages, shared prefixes, cost, and a drawing."""
