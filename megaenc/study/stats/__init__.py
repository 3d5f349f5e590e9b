"""Tests, intervals and pooled comparisons."""
