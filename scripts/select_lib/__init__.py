"""``scripts/select_draft``: which draft to use for a target, measured, predicted and tried."""
