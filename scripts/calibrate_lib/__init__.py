"""``scripts/calibrate``: what an acceptance policy trades on a pair of models, and which of its settings keeps a quality floor."""
