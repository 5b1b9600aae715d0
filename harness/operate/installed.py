"""What is installed on this host, as far as kvpact can use it."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import kvpact
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.provenance import require_installed_files
from kvpact.consensus.transport.gloo import backends
from kvpact.harness.operate.finding import Finding, good, note, wrong

__all__ = ["installed"]

#: Distribution -> what it is for. Not one of them is needed by the library itself.
_OPTIONAL = {
    "ray": "kvpact soak",
    "prometheus-client": "kvpact.metrics, --metrics-port",
    "sglang": "the plugin for SGLang",
    "vllm": "an engine",
    "mooncake-transfer-engine-non-cuda": "storage in Mooncake Store",
    "mooncake-transfer-engine": "storage in Mooncake Store, with CUDA",
}


def installed() -> list[Finding]:
    """Look at kvpact itself, at torch, and at the packages that are used where they are there."""
    return [_kvpact(), good("Python", platform.python_version()), _torch(), *_optional()]


def _kvpact() -> Finding:
    try:
        root = require_installed_files()
    except Misuse as error:
        return wrong("kvpact", error.message, "reinstall kvpact from its wheel")
    return good("kvpact", f"{kvpact.__version__} from {root / 'kvpact'}")


def _torch() -> Finding:
    import torch

    built_in = backends()
    if "gloo" not in built_in:
        return wrong(
            "torch",
            f"{torch.__version__} was built without gloo",
            "install a build of torch with torch.distributed and gloo",
        )
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return good(
        "torch", f"{torch.__version__} with {' and '.join(built_in)}, {devices} CUDA devices"
    )


def _optional() -> list[Finding]:
    findings: list[Finding] = []
    for name, purpose in _OPTIONAL.items():
        try:
            findings.append(good(name, f"{metadata.version(name)} ({purpose})"))
        except metadata.PackageNotFoundError:
            continue
    if not findings:
        findings.append(
            note("extras", "none of the optional packages", "nothing, unless you need one of them")
        )
    if os.environ.get("SGLANG_PLUGINS") and not any(one.subject == "sglang" for one in findings):
        findings.append(
            wrong("sglang", "SGLANG_PLUGINS is set, but SGLang is not installed", "unset it")
        )
    return findings
