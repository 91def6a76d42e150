"""The command `python -m input_preprocessing.instances`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("instances")
