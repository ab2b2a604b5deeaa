"""What ``scripts/hw`` does: look for execution providers and run the real draft on each one that is here."""
