"""Prompts to train a drafter on, and others to measure it with: requests such as chat users make, about many subjects.

No request is taken from a data set. Each is one of the sentences below about one of the subjects below, so that the
model itself writes all the text that its drafter learns from.
"""

from __future__ import annotations

import random

_ABOUT = """
Explain {} to a child.
Explain {} in three sentences.
Write a short story about {}.
Write a poem about {}.
What is {}?
What are the advantages and disadvantages of {}?
Give me five tips about {}.
List ten facts about {}.
Write an email to a colleague about {}.
Write the introduction of an essay on {}.
Summarise what is known about {} in one paragraph.
Describe the history of {}.
How does {} work?
Why is {} important?
Write a dialogue between a teacher and a student about {}.
What should a beginner know about {}?
Compare {} with something similar.
Write a product description that has to do with {}.
Make a plan for a week in which I learn about {}.
Write a blog post about {}.
Ask me three questions about {}, and answer them.
Write a news report about {}.
Give a definition of {}, then an example.
What are common mistakes with {}?
Write a letter to a friend who is interested in {}.
Tell me a joke about {}, and explain it.
What might {} look like in a hundred years?
Write a speech about {}.
Give step by step instructions that have to do with {}.
Name the most important people in the history of {}.
Write a Python dictionary with five facts about {}.
Answer as a pirate: what do you think of {}?
""".strip().splitlines()

_SUBJECTS = (
    """
the moon|volcanoes|photosynthesis|the Roman Empire|chess|bread baking|electric cars|gravity|jazz|black holes|vaccines
the French Revolution|whales|coffee|solar panels|democracy|swimming|the Sahara|inflation|dinosaurs|gardening|algebra
the human heart|trains|ancient Egypt|sleep|bicycles|coral reefs|money|the internet|football|earthquakes|honey bees
probability|wind power|the Renaissance|cats|yoga|robots|the Amazon rainforest|tea|lighthouses|antibiotics|opera
prime numbers|penguins|bridges|the Silk Road|cheese|climate change|ballet|submarines|the periodic table|wolves|painting
time zones|rivers|the stock market|camping|trigonometry|owls|recycling|the Vikings|chocolate|DNA|photography|glaciers
job interviews|the water cycle|tennis|castles|mushrooms|sound waves|public speaking|comets|rice|insulin|sailing|mazes
the printing press|elephants|budgeting|electricity|running a marathon|fairy tales|satellites|rainbows|pottery|ants
sharks|the violin|fractions|plastic|the Great Wall of China|hiking|magnets|spiders|email|nuclear power|cooking pasta
the Olympic Games|batteries|birds of prey|mountains|teamwork|the brain|airplanes|tropical fruit|libraries|knitting|salt
""".strip()
    .replace("\n", "|")
    .split("|")
)

_UNSEEN = (
    """
tides|the Ottoman Empire|origami|lightning|horses|the immune system|urban planning|geometry|the guitar|deserts|dreams
telescopes|cycling to work|the Industrial Revolution|potatoes|penicillin|wooden houses|marine biology|taxes|snow
""".strip()
    .replace("\n", "|")
    .split("|")
)

_CODE = """
Write a Python function that {}.
Write a Python function that {}, with a docstring and a test.
Write a JavaScript function that {}.
Explain how you would write a program that {}.
""".strip().splitlines()

_PROGRAMS = (
    """
reverses a string|finds the largest number of a list|counts the words of a text|checks whether a number is prime
sorts a list of names|computes a factorial|merges two sorted lists|removes duplicates from a list|reads a CSV file
converts Celsius to Fahrenheit|counts vowels|finds the shortest word|adds two matrices|draws a triangle of stars
computes the mean and the median|validates an email address|computes Fibonacci numbers|splits a bill among friends
""".strip()
    .replace("\n", "|")
    .split("|")
)

_UNSEEN_PROGRAMS = ["checks whether a word is a palindrome", "finds the second largest number of a list"]

_EDIT = "Repeat the following text, but write {} instead of {}: {}"
_TEXTS = """
The cat sat on the mat and looked at the dog. The dog did not look at the cat, because the dog was asleep.
Our shop opens at nine and closes at six. On Sundays our shop is closed, and on Mondays our shop opens at ten.
The river runs through the valley. In spring the river is high, and in summer you can walk through the river.
My brother has a red car. He drives the red car to work, and on weekends he washes the red car.
""".strip().splitlines()


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` different requests in random order; fewer if there are not so many."""
    requests = _requests(_SUBJECTS, _PROGRAMS)
    for text in _TEXTS[:-1]:
        words = sorted({word for word in text.replace(".", "").replace(",", "").split() if len(word) > 3})
        requests += [_EDIT.format(word.upper(), word, text) for word in words]
    random.Random(seed).shuffle(requests)
    return requests[:count]


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` requests about subjects that no training prompt has."""
    requests = _requests(_UNSEEN, _UNSEEN_PROGRAMS)
    requests += [_EDIT.format(word.upper(), word, _TEXTS[-1]) for word in ("brother", "drives", "weekends")]
    random.Random(seed).shuffle(requests)
    return requests[:count]


def _requests(subjects: list[str], programs: list[str]) -> list[str]:
    about = [sentence.format(subject) for sentence in _ABOUT for subject in subjects]
    return about + [sentence.format(program) for sentence in _CODE for program in programs]
