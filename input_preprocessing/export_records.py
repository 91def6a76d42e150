"""The command `python -m input_preprocessing.export_records`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("export_records")
