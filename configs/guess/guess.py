"""The guessing game: the environment of run.toml."""

NUMBERS = 25


class Guess:
    """Guess a number in five turns. One that is no number of two digits ends the game."""

    def reset(self, row, seed):
        self.number = 1 + seed % NUMBERS
        return "?"

    def step(self, text):
        if not text.isdigit() or len(text) != 2:
            return "", 0.0, True
        guess = int(text)
        if guess == self.number:
            return "", 1.0, True
        return (">" if self.number > guess else "<"), 0.0, False
