"""Side-by-side benchmark of this system against what vLLM offers by itself. Entry point: ``scripts/bench``."""
