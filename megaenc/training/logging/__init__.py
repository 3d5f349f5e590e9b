"""Messages and metrics of a run: the logger, its backends, profiles, and the detection of loss spikes and stragglers."""
