"""Sources of whole answers without a model, and checks of answers: what an answer chain can rest on besides guesses."""
