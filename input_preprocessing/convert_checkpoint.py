"""The command `python -m input_preprocessing.convert_checkpoint`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("convert_checkpoint")
