"""The formats, one row each, in the order a folder is tried. A new one is a module and a line here."""

from __future__ import annotations

from everstep_convert.formats import dcp, deepspeed, deepspeed_universal, hf, megatron, universal
from everstep_convert.formats.format import Format

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        universal.FORMAT,
        deepspeed.FORMAT,  # before the universal folder: `ds_to_universal` leaves one beside the native files
        deepspeed_universal.FORMAT,
        megatron.FORMAT,  # before dcp: its files are those of dcp, and more
        dcp.FORMAT,
        hf.FORMAT,
    )
}
