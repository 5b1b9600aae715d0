"""Incidents as files, so that ``kvpact explain`` can tell them, from any engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.epoch.report import Incident

__all__ = ["IncidentFiles"]


class IncidentFiles:
    """An ``on_incident`` that writes each incident of a rank to a file in ``folder``.

    ``rank3-0.json``, ``rank3-1.json``, …: at most ``files_max`` a rank, then the oldest is written
    over. Raises :class:`BadInput` at once where ``folder`` cannot be made.
    """

    def __init__(self, folder: Path | str, *, files_max: int = 32) -> None:
        if files_max < 1:
            raise BadInput(f"files_max must be at least 1, got {files_max}")
        self.folder = Path(folder)
        self.num_written = 0
        self._files_max = files_max
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"cannot make the folder for incidents {folder}: {error.strerror}"
            raise BadInput(text) from error

    def __call__(self, incident: Incident) -> None:
        """Write ``incident``; raises OSError where that cannot be."""
        number = self.num_written % self._files_max
        path = self.folder / f"rank{incident.rank}-{number}.json"
        text = msgspec.json.format(msgspec.json.encode(incident))
        half = path.with_suffix(".tmp")
        half.write_bytes(text)
        half.replace(path)  # whoever reads it meanwhile sees a whole one
        self.num_written += 1
