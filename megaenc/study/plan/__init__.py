"""`megaenc study plan`: the graph of stages, shared prefixes, cost, and a drawing of it."""
