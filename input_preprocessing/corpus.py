"""The command `python -m input_preprocessing.corpus`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("corpus")
