"""Parts and fault counts of a node as its system, driver and kernel log tell them; unknown is None."""

import math

import pytest

from certify import hardware
from certify.telemetry import Gpus
from review.acceptance.schema import TABLES

from .test_telemetry import nvml  # noqa: F401

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, more words"
CHECK = "{1}[Hardware Error]: "


@pytest.mark.usefixtures("nvml")
def test_parts_and_past_faults_of_gpus_are_read_through_nvml(tmp_path):
    parts = hardware.inventory(Gpus([]), tmp_path)
    assert (parts["node"]["driver"], parts["node"]["GPUs"]) == ("560.35.03", 2)
    assert parts["GPU 1"] == {
        "name": "H100", "memory MiB": 81920, "VBIOS": "96.00.74", "PCIe generation": 5, "PCIe lanes": 16,
        "NVLinks": 2, "NVLink version": None, "ECC": 1, "MIG": None, "power limit W": 700, "SM MHz": None, "serial": None, "UUID": None,
    }  # fmt: skip
    told = hardware.health(Gpus([]), tmp_path)
    assert told["GPU 1"]["row remappings that wait for a reset"] == 1
    assert told["GPU 0"]["uncorrected memory errors"] == 99


def lay_out(root, texts):
    """Files below a stand-in for the root of the file system."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        whole = text if isinstance(text, bytes) else f"{text}\n".encode()
        (root / name).write_bytes(whole)


def test_ports_and_network_cards_are_read_from_sysfs(tmp_path):
    card, counters = "sys/class/infiniband/mlx5_0", "mlx5_0/ports/1/counters"
    lay_out(tmp_path, {
        f"{card}/ports/1/state": "4: ACTIVE", f"{card}/ports/1/rate": "400 Gb/sec (4X NDR)", f"{card}/node_guid": "a088:c203",
        f"{card}/device/vpd": b"\x82\x08\x00ConnectX\x90\x20\x00SN\x08MT22X01 V1\x041234",
        f"sys/class/infiniband/{counters}/link_downed": "3", f"sys/class/infiniband/{counters}/port_xmit_data": "25",
        "sys/class/net/eth0/device/x": "", "sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/carrier_changes": "2",
        "sys/class/net/eth0/speed": "-1", "sys/class/net/eth0/statistics/tx_bytes": "7",
    })  # fmt: skip
    port = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "serial": "MT22X01"}
    port |= {"GUID": "a088:c203", "link_layer": None, "type": None, "firmware": None}
    parts = hardware.inventory(Gpus([]), tmp_path)
    assert parts["mlx5_0/1"] == port
    assert parts["eth0"] == {"state": "up", "Mbit/s": None}
    told = hardware.health(Gpus([]), tmp_path)
    counts = dict.fromkeys(TABLES["port_counters"]) | {"link_downed": 3}
    assert (told["mlx5_0/1"], told["eth0"]) == (counts, {"carrier_changes": 2})
    sent = hardware.bytes_sent(tmp_path)
    assert sent == {"mlx5_0/1": 100, "eth0": 7}, "in words of 4"


def test_firmware_and_serial_numbers_are_read_where_the_system_tells_them(tmp_path):
    told = hardware.inventory(Gpus([]), tmp_path)
    assert (told["DIMM"], told["node"]["BMC firmware"]) == ({"serial": None}, None)
    module = bytearray(0x28)
    module[1], module[0x0C], module[0x10], module[0x18] = 0x28, 0xFF, 1, 2
    empty = bytes(module[:0x0C]) + b"\0\0" + bytes(module[0x0E:])
    memory = "sys/firmware/dmi/entries/17-"
    switches = "proc/driver/nvidia-nvswitch/devices"
    lay_out(tmp_path, {
        f"{memory}0/raw": bytes(module) + b"A1\x0080CE01\0\0", f"{memory}1/raw": empty + b"A2\0NO DIMM\0\0",
        f"{memory}2/raw": b"\x11", f"{switches}/0000:07:00.0/information": "BIOS Version: 96.10.6d.00.01",
        "sys/devices/platform/ipmi_bmc.0/firmware_revision": "24.1", "sys/class/dmi/id/product_serial": "1660",
    })  # fmt: skip
    told = hardware.inventory(Gpus([]), tmp_path)
    assert (told["node"]["BMC firmware"], told["node"]["serial"]) == ("24.1", "1660")
    assert told["NVSwitch 0000:07:00.0"] == {"firmware": "96.10.6d.00.01"}
    modules = {name: facts for name, facts in told.items() if name.startswith("DIMM")}
    assert modules == {"DIMM A1": {"serial": "80CE01"}}


def test_memory_modules_are_counted_by_size_and_unknown_without_a_driver_of_theirs(
    tmp_path,
):
    assert hardware.inventory(Gpus([]), tmp_path)["node"]["memory modules"] is None
    sizes = enumerate((65536, 65536, 32768))
    counted = "sys/devices/system/edac/mc/mc0/dimm"
    lay_out(tmp_path, {f"{counted}{number}/size": size for number, size in sizes})
    modules = hardware.inventory(Gpus([]), tmp_path)["node"]["memory modules"]
    assert modules == "1 x 32768 MB, 2 x 65536 MB"


def test_gpus_on_the_bus_are_counted_whether_or_not_a_driver_runs_them(tmp_path):
    # Two GPUs, an NVSwitch, and another maker's device.
    known = {
        "a": "10de 030200",
        "b": "10de 030000",
        "c": "10de 068000",
        "d": "15b3 020700",
    }
    for name, words in known.items():
        folder, (vendor, kind) = f"sys/bus/pci/devices/{name}", words.split()
        lay_out(
            tmp_path,
            {f"{folder}/vendor": f"0x{vendor}", f"{folder}/class": f"0x{kind}"},
        )
    without = Gpus([])
    without.nvml = None
    parts = hardware.inventory(without, tmp_path)["node"]
    told = [parts[name] for name in ("GPUs on the PCI bus", "driver", "GPUs")]
    assert told == [2, None, 0]
    # A driver that could not be asked.
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert hardware.inventory(without, tmp_path)["node"]["GPUs"] is None


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"[    1.000000] Linux\n[   20.500000] {XID}\n[   21.000000] usb 1-1: new\n", [[20.5, XID]]),
        ("", None),
        # printk.time=0
        (f"Linux\n{XID}\n", [[math.inf, XID]]),
        # The details of a corrected error are no machine check.
        (f"[    1.000000] {CHECK}Generic\n[    1.000000] {CHECK}event severity: corrected\n", [[1.0, f"{CHECK}event severity: corrected"]]),
        (f"[    1.000000] {CHECK} section_type: memory error\n", []),
    ],
)  # fmt: skip
def test_the_kernel_log_is_read_with_its_times(monkeypatch, tmp_path, text, lines):
    monkeypatch.setattr(hardware, "_dmesg", lambda: text)
    lay_out(
        tmp_path,
        {"proc/sys/kernel/random/boot_id": "b0", "proc/uptime": "100.25 300.00"},
    )
    found = hardware.kernel_log(tmp_path)
    assert (found["boot"], found["read"], found["lines"]) == ("b0", 100.25, lines)
    if "usb" in text:
        assert (found["first"], found["last"]) == (1.0, 21.0)
