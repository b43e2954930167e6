"""The prompts of smollm2.json: chosen for variety of text, and so that no step is a near-tie."""

CHATS = {
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_system": [
        {"role": "system", "content": "You are a patient teacher who explains things to children."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Ada and I like mathematics."},
        {"role": "assistant", "content": "Nice to meet you, Ada! What would you like to do?"},
        {"role": "user", "content": "Write a haiku about my favourite subject."},
    ],
}

TEXTS = {
    "plain": "Once upon a time, in a village by the sea,",
    "code": (
        "def fibonacci(n: int) -> int:\n"
        '    """Return the n-th Fibonacci number."""\n'
        "    if n < 2:\n"
        "        return n\n"
    ),
    "cjk": "日本の首都は東京です。中国的首都是北京。대한민국의 수도는",
    "emoji": "Weather today: 🌧️ then ☀️! My family 👨‍👩‍👧‍👦 went out 🎉🎉",
    "emoji_flags": (
        "Good morning ☀️ everyone! Emoji list: 🍎 apple, 🍌 banana, 🍇 grape, 👨‍👩‍👧 family, 🇯🇵"
    ),
    "one_token": "class",
    "digits": "12345 + 67890 = 80235\n3.14159 is close to 22/7\n2024-12-31\n100, 200, 300,",
    "mixed": (
        "Привет, мир! ¿Qué tal? \tnaïve café — «ok»\n\n  https://example.org/a?b=1&c=%20 it's we'll"
    ),
    "repeated": "The cat sat on the mat. " * 20,
    "prose_150": (
        "The lighthouse keeper had lived on the island for thirty-one years, and in all that time "
        "the lamp had failed only twice. The first time was in the great storm, when the sea came "
        "over the wall and put out the fire in the engine room. The second time was on a clear "
        "summer night without any wind at all, and nobody could ever say why. He wrote both nights "
        "into the log in the same careful hand, with the hour and the state of the tide, and under "
        "the second entry he added a single line: the lamp went out, and I saw the stars. Years "
        "later a young engineer came from the mainland to replace the old machine with a new "
        "electric one. She read the log from the first page to the last, and then she asked him"
    ),
}

_ANIMALS = ["otter", "heron", "badger", "fox", "owl", "hare", "beaver", "wren", "mole", "stoat"]
_PLACES = ["river", "old mill", "orchard", "stone bridge", "meadow", "pine wood", "quarry"]
_THINGS = ["a silver key", "two acorns", "a lost letter", "a red feather", "an empty jar"]

PROSE_600 = "A diary of the valley.\n\n" + "".join(
    f"Day {day}. The {_ANIMALS[day % 10]} went to the {_PLACES[day % 7]} and found "
    f"{_THINGS[day % 5]}; the {_ANIMALS[(3 * day + 1) % 10]} saw it from the "
    f"{_PLACES[(2 * day + 3) % 7]}.\n"
    for day in range(1, 40)
)
