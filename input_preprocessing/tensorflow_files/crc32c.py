"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, eight bytes at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled

_POLYNOMIAL = 0x82F63B78


def _tables() -> npt.NDArray[np.uint32]:
    """(8, 256): effect of a byte that k more bytes follow."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        tables[0, byte] = value
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> np.uint32(8)) ^ tables[0, tables[k - 1] & np.uint32(255)]
    return tables


TABLES = _tables()


@compiled
def _update(crc, data, tables):  # type: ignore[no-untyped-def]
    crc = np.uint32(crc)
    whole = data.size - data.size % 8
    for i in range(0, whole, 8):
        low = crc ^ (
            np.uint32(data[i])
            | (np.uint32(data[i + 1]) << np.uint32(8))
            | (np.uint32(data[i + 2]) << np.uint32(16))
            | (np.uint32(data[i + 3]) << np.uint32(24))
        )
        crc = (
            tables[7, low & np.uint32(255)]
            ^ tables[6, (low >> np.uint32(8)) & np.uint32(255)]
            ^ tables[5, (low >> np.uint32(16)) & np.uint32(255)]
            ^ tables[4, low >> np.uint32(24)]
            ^ tables[3, data[i + 4]]
            ^ tables[2, data[i + 5]]
            ^ tables[1, data[i + 6]]
            ^ tables[0, data[i + 7]]
        )
    for i in range(whole, data.size):
        crc = (crc >> np.uint32(8)) ^ tables[0, (crc ^ np.uint32(data[i])) & np.uint32(255)]
    return crc


@compiled
def masked_crc(data, tables):  # type: ignore[no-untyped-def]
    """The form in which TensorFlow stores the CRC of a uint8 array beside the data it covers; for compiled callers."""
    crc = np.uint64(_update(np.uint32(0xFFFFFFFF), data, tables) ^ np.uint32(0xFFFFFFFF))
    rotated = (crc >> np.uint64(15)) | (crc << np.uint64(17))
    return (rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)


def crc32c(data: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """CRC-32C of bytes, or of a uint8 array."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    return int(_update(np.uint32(0xFFFFFFFF), array, TABLES)) ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The form in which TensorFlow stores a CRC beside the data it covers."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
