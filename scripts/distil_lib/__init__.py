"""Trains a draft for a target from what the target itself writes."""
