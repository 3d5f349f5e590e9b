"""Results that claims and tables are computed from: collected, grouped, and the published ones."""
