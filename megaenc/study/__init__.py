"""What runs say, made visible: from run folders to figures and tables."""
