"""Coordination of ranks: collective calls, signal handling, the watchdog and the diagnosis of skipped steps."""
