"""scripts/validator_worker."""
