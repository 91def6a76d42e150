"""The command `python -m input_preprocessing.import_records`."""

from input_preprocessing.commands import start

if __name__ == "__main__":
    start("import_records")
