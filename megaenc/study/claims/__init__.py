"""Claims of a study, the tests behind them, and the verdicts."""
