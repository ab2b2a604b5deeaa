"""Acceptance rules: pure functions that say which prefix of a draft is committed."""
