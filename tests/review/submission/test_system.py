"""A system description has what can be probed, no blanks that crash the official tools, and passes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from review.logs.output import ReviewError
from review.logs.tree import read_object
from review.rulebook import official
from review.rulebook.description import FIELDS
from review.submission import system
from review.submission.system import Machine, probe

LSCPU = """\
CPU(s):                    224
Model name:                Intel(R) Xeon(R) Platinum 8480C
Thread(s) per core:        2
Core(s) per socket:        56
Socket(s):                 2
"""
MODULE = """
Handle 0x0020, DMI type 17, 92 bytes
Memory Device
\tTotal Width: 80 bits
\tSize: 64 GB
\tForm Factor: DIMM
\tType: DDR5
\tSpeed: 4800 MT/s
\tConfigured Memory Speed: 4400 MT/s
"""
EMPTY_SLOT = "\nHandle 0x0021, DMI type 17, 92 bytes\nMemory Device\n\tSize: No Module Installed\n\tType: Unknown\n"
GPU = "NVIDIA H100 80GB HBM3, 81559, 1980, 5, 16, 550.54.15\n"
NVME = {"type": "disk", "size": 3840755982336, "rota": False, "tran": "nvme"}
DISKS: list[dict[str, Any]] = [
    *({"name": f"nvme{i}n1", **NVME} for i in range(8)),
    {"name": "sda", "type": "disk", "size": "16000900661248", "rota": "1"},
    {"name": "loop0", "type": "loop", "size": 5, "rota": False, "tran": None},
    {"name": "zram0", "type": "disk", "size": 0, "rota": False, "tran": None},
]
LINKS = "".join(
    f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n"
    + "".join(f"\t Link {n}: 26.562 GB/s\n" for n in range(18))
    for i in range(8)
)
DGX_COMMANDS = {
    "lscpu": LSCPU,
    "dmidecode": MODULE * 32 + EMPTY_SLOT,
    "lsblk": json.dumps({"blockdevices": DISKS}),
    "nvidia-smi --query-gpu": GPU * 8,
    "nvidia-smi nvlink": LINKS,
    "uname": "Linux 5.15.0-1042-nvidia\n",
    "python3": "Python 3.12.3\n",
}
DGX_FILES = {
    "/sys/class/dmi/id/sys_vendor": "NVIDIA",
    "/sys/class/dmi/id/product_name": "DGXH100",
    "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
    "/proc/meminfo": "MemTotal:       2113453236 kB\n",
}
for index in range(10):
    port = f"/sys/class/infiniband/mlx5_{index}/ports/1"
    DGX_FILES[f"{port}/rate"] = "400 Gb/sec (4X NDR)"
    DGX_FILES[f"{port}/link_layer"] = "InfiniBand"
    DGX_FILES[f"{port}/state"] = "4: ACTIVE" if index < 8 else "1: DOWN"


class Fake(Machine):
    def __init__(self, commands=(), files=(), environment=(), packages=()):
        self.commands, self.files = dict(commands), dict(files)
        self.environment, self.packages = dict(environment), dict(packages)

    def run(self, *command):
        line, known = " ".join(command), self.commands.items()
        return next((text for start, text in known if line.startswith(start)), "")

    def read(self, path):
        return self.files.get(path, "")

    def paths(self, folder, pattern):
        below = [path for path in self.files if path.startswith(folder)]
        return sorted(path for path in below if Path(path).match(pattern))

    def version(self, package):
        return self.packages.get(package, "")


NGC = {"NVIDIA_PYTORCH_VERSION": "25.04", "CUDA_VERSION": "12.9.0.036"}
NGC["NCCL_VERSION"] = "2.26.3"
KNOWN = {"division": "closed", "status": "Available on-premise"}
KNOWN |= {"number_of_nodes": "1", "accelerators_per_node": "8"}
SET = [word for name in KNOWN for word in ("--set", f"{name}={KNOWN[name]}")]
DGX = Fake(DGX_COMMANDS, DGX_FILES, NGC, {"transformer-engine": "2.2.0"})


def test_a_dgx_is_described_in_full():
    found = probe(DGX)
    assert found == {
        "system_name": "NVIDIA DGXH100", "host_processor_model_name": "Intel(R) Xeon(R) Platinum 8480C",
        "host_processors_per_node": "2", "host_processor_core_count": "56",
        "host_processor_vcpu_count": "112",
        "host_memory_capacity": "2 TB",
        "host_memory_configuration": "32x 64 GB DDR5-4400", "host_storage_type": "NVMe SSD, HDD",
        "host_storage_capacity": "8x 3.84 TB NVMe SSD, 1x 16 TB HDD", "host_networking": "8x InfiniBand 400 Gb/s",
        "host_network_card_count": "8", "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3", "accelerator_memory_capacity": "81559 MiB",
        "accelerator_memory_configuration": "HBM3", "accelerator_frequency": "1980 MHz max",
        "accelerator_host_interconnect": "PCIe Gen5 x16", "accelerator_interconnect": "NVLink, 18 links, 956 GB/s",
        "framework": "NVIDIA PyTorch Release 25.04",
        "other_software_stack": {"cuda_version": "12.9.0.036", "nccl_version": "2.26.3", "transformer_engine_version": "2.2.0", "python_version": "3.12.3", "kernel_version": "Linux 5.15.0-1042-nvidia", "nvidia_kernel_driver": "550.54.15"},
        "operating_system": "Ubuntu 22.04.4 LTS",
    }  # fmt: skip


def test_without_dmidecode_the_kernel_says_how_much_memory_there_is():
    found = probe(Fake({**DGX_COMMANDS, "dmidecode": ""}, DGX_FILES))
    assert found["host_memory_capacity"] == "1.97 TB"
    assert "host_memory_configuration" not in found


@pytest.mark.parametrize("garbage", [
    "", "error\n", "\0\1", "a,b\n" * 3, "{}", "[1]", '{"blockdevices": [3]}', ":\n::",
])  # fmt: skip
def test_probes_survive_whatever_commands_print(garbage, tmp_path):
    printed = [dict.fromkeys(names, garbage) for names in (DGX_COMMANDS, DGX_FILES)]
    described = system.describe([], Fake(*printed))
    assert described.fields.keys() == FIELDS.keys()
    with pytest.raises(ReviewError, match="not known: division"):
        system.write(described, tmp_path / "x.json")


def test_what_a_machine_does_not_say_is_asked_for_by_name_and_never_invented(tmp_path):
    path = tmp_path / "systems" / "silent.json"
    with pytest.raises(ReviewError) as asked:
        system.write(system.describe([], Fake()), path)
    for name in KNOWN:
        assert f"{name} (" in str(asked.value)
    assert not path.exists()
    given = {**KNOWN, "accelerators_per_node": "0"}
    described = system.describe([("--set", given)], Fake())
    system.write(described, path)
    fields = json.loads(path.read_text())
    assert fields["accelerator_model_name"] == "N/A"
    assert official.check_system(path, "5.0.0").passed
    assert {"cooling", "submitter", "framework"} <= set(described.blanks)


def test_this_very_machine_is_described_and_passes(tmp_path, command):
    path = tmp_path / "here.json"
    given = [*SET, "--set", "system_type=datacenter"]
    said = command("system", "-o", path, *given, "--json").json
    fields = json.loads(path.read_text())
    assert said["fields"] == fields
    assert fields["host_processor_model_name"]
    assert fields["operating_system"]
    assert fields["system_type"] == "datacenter"
    assert official.check_system(path, "5.0.0").passed


def test_the_first_source_that_knows_a_field_counts():
    file = {"cooling": "air", "number_of_nodes": 4, "hw_notes": ""}
    given = [("--set", {"cooling": "liquid"}), ("file", file)]
    described = system.describe(given, DGX)
    assert described.fields["cooling"] == "liquid"
    assert described.fields["number_of_nodes"] == "4", "values are strings"
    assert described.sources["cooling"] == "--set"
    assert described.sources["accelerators_per_node"] == "this machine"
    assert "division" not in described.sources


def test_a_run_tells_the_versions_that_ran(tmp_path):
    environment = {
        "gpus": ["NVIDIA H200"] * 4, "cuda": "13.0", "cudnn": 91900, "python": "3.12.1",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    }  # fmt: skip
    mlperf = {"division": "closed", "organization": "EXAMPLE", "num_nodes": 2}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    (tmp_path / "config.json").write_text(json.dumps({"mlperf": mlperf}))
    fields = system.describe([("run", system.from_run(tmp_path))], DGX).fields
    assert fields["framework"] == "PyTorch 2.13.0"
    assert fields["submitter"] == "EXAMPLE"
    assert (fields["number_of_nodes"], fields["accelerators_per_node"]) == ("2", "4")
    stack = fields["other_software_stack"]
    found = [stack[f"{name}_version"] for name in ("cuda", "cudnn", "nccl")]
    assert found == ["13.0", "91900", "2.26.3"], "what ran, then what is here"


def test_update_fills_blanks_and_keeps_the_rest(tmp_path, command):
    path = tmp_path / "x.json"
    given = {"cooling": "", "system_name": "Box", "framework_name": "ours"}
    path.write_text(json.dumps(given))
    words = ["system", "-o", path, "--set", "cooling=air", *SET]
    status, _, error = command(*words)
    assert (status, "--update" in error) == (2, True)
    assert command(*words, "--update").status == 0
    fields = json.loads(path.read_text())
    assert fields | given | {"cooling": "air"} == fields


@pytest.mark.parametrize(("arguments", "says"), [
    (["--set", "cooling"], "FIELD=VALUE"),
    (["--set", "colling=air"], "unknown field 'colling'"),
    (["--set", "number_of_nodes=two"], "number_of_nodes"),
    (["--set", "division=Closed"], "closed or open"),
    (["--set", "status=shipping"], "status"),
    (["--answers", "{folder}/none.json"], "No such file"),
    (["--answers", "{folder}/list.json"], "expected a JSON object"),
    (["--answers", "{folder}/broken.json"], "not JSON"),
    (["--run", "{folder}"], "environment.json"),
    (["-o", "{folder}/a b.json"], "neither spaces"),
    (["-o", "{folder}/a.txt"], ".json"),
    (["-o", "{folder}/list.json/x.json"], "list.json"),
])  # fmt: skip
def test_wrong_input_is_a_line_and_no_more(tmp_path, command, arguments, says):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    words = ["-o", tmp_path / "x.json", *SET, *arguments]
    status, _, error = command("system", *words)
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("review: error: ")
    assert says in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_machine_without_the_commands_is_no_error():
    machine = Machine()
    assert machine.run("no-such-command-at-all") == ""
    assert machine.run("false") == ""
    assert machine.read("/no/such/file") == ""
    assert machine.version("no-such-package") == ""
    with pytest.raises(ReviewError, match="--set x"):
        system.parse_settings(["x"])


def test_answers_to_fill_in_are_known_and_blank_ones_no_answer(repository):
    path = repository / "systems" / "answers.json"
    answers = system.known(read_object(path), "answers.json")
    wanted = {name for name, required in FIELDS.items() if required}
    assert wanted - {*probe(DGX)} <= {*answers, "number_of_nodes"}
    described = system.describe([("file", answers)], DGX)
    assert described.fields["system_name"] == "NVIDIA DGXH100"
