"""The answer chain: whole candidate answers from several sources, what they agree on, and who decides where they do not."""
