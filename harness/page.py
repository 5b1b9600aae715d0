from __future__ import annotations
from pathlib import Path
from harness.report import SoakReport
def write_page(report: SoakReport, path: Path) -> None:
    pass
