"""The study's metrics and the field's, as functions of predictions alone; docs/metrics.md has a worked example of each."""
