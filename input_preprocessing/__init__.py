"""Data preparation, from text to packed records: `python -m input_preprocessing STAGE`, one
function per stage.
"""

# Name: function of the command, summary. In the order of a preparation.
STAGES = {
    "prepare": (
        "dataset.prepare.main",
        "all steps below that a data set needs; prepare_data.sh runs it",
    ),
    "download": (
        "dataset.download.main",
        "fetch and check the benchmark's public files",
    ),
    "finetuning": (
        "dataset.finetuning.main",
        "fetch and check SQuAD or a GLUE task, for run_finetuning.sh",
    ),
    "corpus": (
        "text.corpus.main",
        "sentences, vocabulary and model size from your own text",
    ),
    "extract": ("wiki.extract.main", "articles from Wikipedia dumps"),
    "clean": ("wiki.clean.main", "sentences from the articles' mark-up"),
    "split": ("wiki.split.main", "articles into part files and evaluation text"),
    "instances": ("instances.command.main", "tokenise, pair and mask a text file"),
    "evalset": ("records.evalset.main", "choose the evaluation samples"),
    "shuffle": ("records.shuffle.main", "instances into shuffled shards"),
    "pack": ("records.pack.main", "instances into shards of packed rows"),
    "bins": ("records.bins.main", "instances into bins of similar length"),
    "import_records": (
        "records.tfrecord_nvidia.import_main",
        "TFRecord files and NVIDIA's HDF5 shards to records",
    ),
    "export_records": (
        "records.tfrecord_nvidia.export_main",
        "records to TFRecord files and NVIDIA's HDF5 shards",
    ),
    "convert_checkpoint": (
        "checkpoints.convert.main",
        "convert TensorFlow and PyTorch checkpoints",
    ),
    "upgrade": (
        "records.upgrade.main",
        "rewrite record files of an older version in place",
    ),
    "verify": ("verify.verdict.main", "check a prepared data set"),
}
