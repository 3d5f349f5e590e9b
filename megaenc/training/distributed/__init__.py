"""Coordination of ranks: collective calls, signal handling and the watchdog."""
