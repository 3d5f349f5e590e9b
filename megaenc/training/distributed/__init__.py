"""Coordination of ranks: collective calls, signals, watchdog, skipped steps."""
