"""Prompts to draw answers with: a small grammar of our own, and openings that the target goes on from by itself.

The grammar covers what people ask in everyday prose; the openings let the target bring up what it knows about.
"""

import random
from dataclasses import dataclass

THINGS = (
    "a ferry", "a beehive", "a violin", "a compost heap", "a bakery", "a weather balloon", "a tram", "a bicycle wheel",
    "a water mill", "a village market", "a telescope", "a greenhouse", "a coral reef", "a kite", "a subway map", "a piano",
    "a volcano", "a glacier", "a sewing machine", "a chess club", "a library card", "a thermos flask", "a rain gutter",
    "a radio tower", "a sourdough starter", "a fishing net", "a mountain hut", "a printing press", "a barometer", "a canal lock",
    "a vegetable garden", "a school play", "a hiking trail", "a power plant", "a bird feeder", "a wristwatch", "a tide pool",
    "a film camera", "a choir", "a parking garage", "a snow plough", "a solar panel", "a wind turbine", "a family recipe",
    "a rowing boat", "a museum at night", "a desert", "a rainforest", "a storm", "an earthquake", "an orchard", "an elevator",
    "an old map", "an electric car", "an empty stadium", "an apprentice", "a comet", "a magnet", "a bridge", "a heat wave",
)  # fmt: skip
SUBJECTS = (
    "learning to cook for one", "sleeping better", "saving money as a student", "moving to a small town", "keeping a diary",
    "working from home", "speaking in front of people", "growing tomatoes on a balcony", "training for a first marathon",
    "reading more books", "learning the guitar at forty", "making friends in a new city", "repairing clothes", "photography",
    "planning a wedding on a budget", "caring for an elderly parent", "meditation", "buying a used car", "healthy breakfasts",
    "raising chickens", "camping with small children", "learning Spanish", "giving up sugar", "writing a first novel",
    "volunteering", "choosing a university course", "asking for a raise", "teamwork", "public transport", "recycling at home",
    "the history of bread", "how vaccines work", "the causes of inflation", "renewable energy", "social media and teenagers",
    "the human heart", "photosynthesis", "the Roman Empire", "the water cycle", "gravity", "evolution", "the French Revolution",
    "artificial intelligence", "the stock market", "climate change", "democracy", "the solar system", "black holes", "bacteria",
    "ocean currents", "the invention of the telephone", "jazz", "impressionist painting", "the Silk Road", "ancient Egypt",
    "time management", "leadership", "customer service", "online privacy", "home insulation", "dental care", "first aid",
)  # fmt: skip
PEOPLE = (
    "a night nurse", "a retired sailor", "a young teacher", "a taxi driver", "a clockmaker", "two sisters", "a gardener",
    "a boy who never speaks", "a tired detective", "a robot cook", "an astronaut", "a beekeeper", "a street musician",
    "a grandmother", "a postman", "a shy dragon", "a talking crow", "a lost traveller", "an inventor", "a firefighter",
    "a student on her first day", "an honest thief", "a ship's cook", "a farmer", "a translator", "a ghost", "three old friends",
)  # fmt: skip
EVENTS = (
    "finds a key that fits no door", "misses the last train", "inherits a house by the sea", "hears music from the cellar",
    "wakes up in another century", "must choose between two jobs", "gets a letter with no sender", "loses a bet",
    "plants a tree that grows overnight", "learns an old family secret", "wins a strange prize", "is snowed in for a week",
    "meets a stranger on a bridge", "repairs a broken radio", "forgets an important promise", "opens a tiny restaurant",
    "takes the wrong suitcase", "befriends a stray cat", "discovers an island on no map", "returns home after ten years",
)  # fmt: skip
READERS = (
    "a child of eight", "a new colleague", "my grandfather", "a class of teenagers", "a tourist", "a busy manager", "a beginner",
    "somebody who has never heard of it", "a sceptic", "a local newspaper", "a friend", "first-year students",
)  # fmt: skip
LETTERS = (
    "a landlord about a broken heater", "a former teacher to thank her", "a hotel where I left my coat", "my sister about a visit",
    "a company I would like to work for", "a customer whose order is late", "the council about a dangerous crossing",
    "a friend who is ill", "my team about a change of plan", "a neighbour about a shared fence", "a club I want to leave",
    "a bank about a wrong charge", "parents about a school trip", "an old friend I have not seen for years",
)  # fmt: skip
PAIRS = (
    ("tea", "coffee"), ("a dog", "a cat"), ("renting", "buying a home"), ("a bicycle", "a scooter"), ("the sea", "the mountains"),
    ("paper books", "e-readers"), ("city life", "country life"), ("gas stoves", "induction stoves"), ("cash", "cards"),
    ("morning exercise", "evening exercise"), ("working alone", "working in a team"), ("trains", "long-distance buses"),
    ("wool", "cotton"), ("summer", "winter"), ("a tablet", "a laptop"), ("baking", "frying"), ("football", "basketball"),
    ("planning ahead", "improvising"), ("live concerts", "recordings"), ("fresh vegetables", "frozen vegetables"),
)  # fmt: skip
TASKS = (
    "Explain {subject} to {reader}.", "Explain in plain words how {thing} works.", "What should I know about {subject}?",
    "Write a short story in which {person} {event}.", "Tell a story about {person} and {thing}.",
    "Write the opening paragraph of a novel in which {person} {event}.", "Describe {thing} for {reader}.",
    "Write a letter to {letter}.", "Write an email to {letter}. Keep it short and friendly.",
    "Compare {one} and {other}.", "Which is better, {one} or {other}, and why?", "What are the advantages of {one} over {other}?",
    "Give me advice on {subject}.", "I am interested in {subject}. Where do I start?", "Write a short essay about {subject}.",
    "What are common mistakes people make with {subject}?", "List ten facts about {subject}.", "List five tips for {subject}.",
    "Write a poem about {thing}.", "Write a dialogue between {person} and {other_person} about {subject}.",
    "Summarize the most important points about {subject} in one paragraph.", "How did {thing} change people's lives?",
    "Why is {subject} important?", "Imagine you are {person}. Describe your day.", "Write a speech about {subject} for {reader}.",
    "Draft a blog post about {subject}.", "Write a product description for {thing}.", "What could go wrong with {thing}?",
    "Describe the sounds and smells of {thing}.", "Plan a weekend around {thing}.", "How would {person} explain {subject}?",
    "Write a news report: {person} {event}.", "Teach me about {subject} step by step.", "Write a review of {thing}.",
    "Give three arguments for and three against {subject}.", "Write a diary entry of {person} who {event}.",
    "What questions should I ask before I start with {subject}?", "Invent a game that involves {thing}.",
    "Continue this story: One evening {person} {event}, and", "What is the history of {thing}?",
)  # fmt: skip
OPENERS = ("", "", "", "", "", "Please help me. ", "Hi! ", "Hello, ", "I have a question. ", "Be brief. ", "In detail: ", "Quick one: ")  # fmt: skip
ENDINGS = ("", "", "", "", "", "", " Use simple language.", " Keep it under 200 words.", " Give examples.", " Make it funny.", " Use a warm tone.")  # fmt: skip

# Beginnings of a user's turn that the target completes; empty ones let it choose.
STARTS = (
    "", "", "", "", "How ", "How can I ", "How does ", "What ", "What is ", "What are ", "Write ", "Write a story ", "Write a ",
    "Explain ", "I ", "I want to ", "I have ", "I'm ", "Can you ", "Could you ", "Why ", "Why do ", "Give me ", "My ", "Is ",
    "Describe ", "Describe how ", "List ", "Tell me ", "Tell me about ", "Create ", "The ", "When ", "Imagine ", "Help me ",
    "Summarize ", "Suggest ", "Compare ", "Who ", "Where ", "Should ", "Please ", "Design ", "Which ", "Hi", "In ", "If ", "A ",
    "Consider ", "Provide ", "What would ", "What's the difference between ", "Write a letter ", "Write an essay ", "Discuss ",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A user's turn, or the beginning of one. ``kind``: where it is from."""

    text: str
    kind: str


class Grammar:
    """Draws prompts; distinct seeds give distinct streams."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def opening(self) -> Prompt:
        """The beginning of a turn."""
        return Prompt(self._random.choice(STARTS), "own")

    def draw(self) -> Prompt:
        """A whole turn."""
        one = self._random.choice
        person, other_person = self._random.sample(PEOPLE, 2)
        first, second = self._random.sample(one(PAIRS), 2)
        asked = one(TASKS).format(
            subject=one(SUBJECTS), thing=one(THINGS), reader=one(READERS), letter=one(LETTERS), event=one(EVENTS),
            person=person, other_person=other_person, one=first, other=second,
        )  # fmt: skip
        return Prompt(f"{one(OPENERS)}{asked}{one(ENDINGS)}", "grammar")
