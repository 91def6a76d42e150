"""The command `python -m input_preprocessing.extract`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("extract")
