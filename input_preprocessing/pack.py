"""The command `python -m input_preprocessing.pack`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("pack")
