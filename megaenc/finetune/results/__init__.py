"""Result files, confidence intervals over seeds, and the summary tables."""
