"""Validators: programs that look at a draft and tag it. docs/validators.md lists them."""
