"""The command `python -m input_preprocessing.data_card`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("data_card")
