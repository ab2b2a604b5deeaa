"""``scripts/serve``: a private Ray, the application of a Serve config, and one chat that shows what the chain does."""
