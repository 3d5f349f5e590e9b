"""What an exported encoder can do, by transformers alone."""
