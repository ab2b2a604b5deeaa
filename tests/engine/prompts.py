"""Prompts of the equality tests: plain text and chat turns of different kinds and lengths."""

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small harbour town,",
    "def fibonacci(n):\n",
    "List three fruits:\n1.",
    "the " * 48,
    "Q: What is 17 plus 25?\nA:",
    '{"name": "Ada", "year": 1815}\n{"name": "Alan", "year":',
    "A B C D E F A B C D E F A B C",
    *(
        _CHAT.format(text)
        for text in (
            "Hello!",
            "Say only the word yes.",
            "Write a haiku about rain.",
            "Explain in two sentences why the sky is blue.",
            "Repeat after me: red, green, blue, red, green, blue.",
            "Translate to French: good morning.",
            "Name a planet.",
            "Give me a recipe for pancakes.",
            "What is the difference between a list and a tuple in Python?",
            "Write a short letter to a neighbour about a lost cat.",
            "Count from 1 to 20.",
            "Sort these numbers: 9, 3, 7, 1.",
            "Who wrote Hamlet?",
            "Write a regular expression for a date such as 2024-05-17.",
            "Summarise: The meeting moved from Monday to Thursday because the room was taken.",
            "What should I pack for a week in the mountains?",
        )
    ),
]
