"""What the parts of a round cost on this machine. Entry point: ``scripts/profile``."""
