"""The command `python -m input_preprocessing.finetuning`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("finetuning")
