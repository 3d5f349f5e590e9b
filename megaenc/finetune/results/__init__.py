"""Result files, intervals over seeds, and summary tables."""
