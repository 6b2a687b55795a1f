"""Whether a PNG file is whole, at a third of what decoding it takes: its own checksums say so."""

from __future__ import annotations

import struct
import zlib

_BEGIN = b"\x89PNG\r\n\x1a\n"
_HEAD = struct.Struct(">I4s")
_CHANNELS = {0: 1, 2: 3, 6: 4}  # of grey, RGB and RGBA


def png_shape(content: bytes) -> list[int] | None:
    """Returns [height, width, channels] of a PNG file that is whole.

    Each chunk's checksum is compared, and that of the pixels, which must be as many as the header
    says (https://www.w3.org/TR/png-3/). Palettes, transparent colours and interlaced files are left
    to TensorFlow, as is whatever is wrong.

    Returns:
        None where decoding has to tell.
    """
    if not content.startswith(_BEGIN):
        return None
    place, end, pixels, header = 8, len(content), [], b""
    while place + 12 <= end:
        size, kind = _HEAD.unpack_from(content, place)
        stop = place + 8 + size
        if stop + 4 > end:
            return None
        if zlib.crc32(content[place + 4 : stop]) != int.from_bytes(content[stop : stop + 4], "big"):
            return None
        if kind == b"IDAT":
            pixels.append(content[place + 8 : stop])
        elif kind == b"IHDR":
            header = content[place + 8 : stop]
        elif kind in (b"PLTE", b"tRNS"):
            return None
        elif kind == b"IEND":
            break
        place = stop + 4
    else:
        return None
    if len(header) != 13:
        return None
    width, height, bits, colours, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    channels = _CHANNELS.get(colours)
    if channels is None or interlaced or not 0 < width * height < 2**28:
        return None
    expected = height * (1 + (width * channels * bits + 7) // 8)
    inflate = zlib.decompressobj()
    try:
        found = len(inflate.decompress(b"".join(pixels), expected + 1))
    except zlib.error:
        return None
    return [height, width, channels] if found == expected and inflate.eof else None
